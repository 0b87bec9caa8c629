"""How deep a costly drafter goes: each level must earn more than it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.control.cost_table import CostTable

DEAREST = 0.95  # no price, however high, stops a level whose parents are certain to be reached


@dataclass(frozen=True, slots=True)
class Pace:
    """cost: of one level by sequences. rate: tokens per millisecond that the batch earns otherwise. row_ms: price of
    verifying a node. follow: share of reached nodes below which the drafter then holds the target's choice."""

    cost: CostTable
    rate: float
    row_ms: float
    follow: float

    def floor(self, batch: int) -> float:
        """Log of the least chance of being reached at which a node is worth its share of a level for ``batch``."""
        if not self.cost.known:
            return -math.inf
        price = self.rate * (self.cost.ms(batch) / batch + self.row_ms) / self.follow
        return math.log(min(DEAREST, max(price, 1e-3)))

    def keep(self, reached: Sequence[float], others: int = 0) -> int:
        """How many of the growing trees go on for one level more. reached: the chance that each one's best leaf is
        reached, falling. others: trees that go on in any case and share the price."""
        if not self.cost.known:
            return len(reached)
        best, kept, tokens = 0.0, 0, 0.0
        paid = self.cost.ms(others) if others else 0.0
        for n, chance in enumerate(reached, 1):
            tokens += chance * self.follow
            worth = tokens - self.rate * (self.cost.ms(others + n) - paid + n * self.row_ms)
            if worth > best:
                best, kept = worth, n
        return kept
