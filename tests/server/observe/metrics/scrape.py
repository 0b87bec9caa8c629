"""A scrape of a server's metrics, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """Values by name of the sample and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """The sample of that name with just these labels, among others it may have; there must be one."""
        found = [
            sample.value
            for sample in self._samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, f"{name} {labels}: {len(found)} samples"
        return float(found[0])

    def names(self) -> set[str]:
        """Of all samples."""
        return {sample.name for sample in self._samples()}

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Values of a sample's name by one of its labels."""
        return {s.labels[label]: s.value for s in self._samples() if s.name == name and label in s.labels}

    def _samples(self) -> Iterable:  # type: ignore[type-arg]
        return (sample for family in self.families.values() for sample in family.samples)
