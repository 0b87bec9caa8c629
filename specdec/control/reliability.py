"""How far the chances that were predicted are to be trusted."""

from __future__ import annotations

from collections.abc import Iterable

BINS = 10


class Reliability:
    """Per drafter, in ten bins of predicted chance: what was predicted, what happened, how often."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._bins = {name: [[0.0, 0.0, 0.0] for _ in range(BINS)] for name in drafters}

    def add(self, drafter: str, predicted: float, hit: bool) -> None:
        """A node whose parent was reached."""
        found = self._bins[drafter][min(BINS - 1, int(predicted * BINS))]
        found[0] += predicted
        found[1] += hit
        found[2] += 1.0

    def table(self) -> dict[str, list[tuple[float, float, float]]]:
        """Per drafter the bins that hold anything: (mean predicted, observed rate, nodes)."""
        return {name: [(p / n, h / n, n) for p, h, n in bins if n] for name, bins in self._bins.items()}
