"""A running ratio of what was observed to what was expected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ratio:
    """Observed over expected, as a running ratio shrunk to that of ``pool`` (None: to 1).

    ``prior``: expectations that weigh as much as the pool's word. ``keep``: what is left of an observation's weight
    after the next one.
    """

    prior: float
    least: float
    most: float
    keep: float = 0.98
    pool: Ratio | None = None
    observed: float = 0.0
    expected: float = 0.0

    @property
    def value(self) -> float:
        """The ratio, within ``least`` and ``most``."""
        towards = 1.0 if self.pool is None else self.pool.value
        found = (self.observed + self.prior * towards) / (self.expected + self.prior)
        return max(self.least, min(self.most, found))

    def add(self, expected: float, observed: float) -> None:
        """``expected`` was hoped for and ``observed`` came."""
        self.observed = self.keep * self.observed + observed
        self.expected = self.keep * self.expected + expected
        if self.pool is not None:
            self.pool.add(expected, observed)
