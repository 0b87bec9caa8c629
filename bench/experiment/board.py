"""Where a run is: what a progress line shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.metrics import METRICS
from server.experiment.record import Record


class Board:
    """Counts of what was recorded so far, without the warm-up. ``done``: pairs with a record in both arms;
    ``mismatched``: those of them that were answered differently; ``failed``: requests per arm. ``planned``: pairs, or
    None where only time ends it."""

    def __init__(self, config: ExperimentConfig, planned: int | None) -> None:
        self.names = (config.control, config.treatment)
        self.metric = config.primary.metric
        self.planned = planned
        self.done: set[str] = set()
        self.mismatched: set[str] = set()
        self.asked, self.failed = [0, 0], [0, 0]
        self._values: tuple[list[float], list[float]] = ([], [])
        self._open: dict[str, Record] = {}

    def add(self, records: Iterable[Record]) -> None:
        """More records."""
        for record in records:
            if record.warm_up or record.arm not in self.names:
                continue
            arm = self.names.index(record.arm)
            self.asked[arm] += 1
            self.failed[arm] += not record.ok
            value = METRICS[self.metric].value(record) if record.ok else math.nan
            if math.isfinite(value):
                self._values[arm].append(value)
            if record.pair:
                self._pair(record)

    def medians(self) -> tuple[float | None, float | None]:
        """Of the primary metric, in both arms."""
        a, b = (statistics.median(values) if values else None for values in self._values)
        return a, b

    def _pair(self, record: Record) -> None:
        other = self._open.pop(record.pair, None)
        if other is None or other.arm == record.arm:
            self._open[record.pair] = record
            return
        self.done.add(record.pair)
        if record.ok and other.ok and record.token_hash != other.token_hash:
            self.mismatched.add(record.pair)
