"""When requests arrive where nobody waits for answers: evenly, at random, in bursts, at a rate that may change."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arrivals:
    """``rate`` requests per second at first, changing evenly to ``end_rate`` (None: as at first) in ``duration_s``.

    ``shape`` None: evenly spaced. Else the gaps between arrivals, in units of the mean gap at that time, are gamma
    distributed with this shape: 1 is a Poisson process, less comes in bursts, more is more regular.

    Raises:
        ConfigError: a figure is out of range.
    """

    rate: float
    duration_s: float
    end_rate: float | None = None
    shape: float | None = 1.0

    def __post_init__(self) -> None:
        for name in ("rate", "duration_s", "end_rate", "shape"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"arrivals: {name} must be positive, not {value}")

    @property
    def expected(self) -> float:
        """Mean number of arrivals."""
        last = self.rate if self.end_rate is None else self.end_rate
        return (self.rate + last) / 2 * self.duration_s

    def offsets(self, seed: int) -> list[float]:
        """Seconds after the beginning, ascending, in [0, duration_s); the same for the same seed.

        A process of rate 1 is stretched by the inverse of the integrated rate, so a ramp keeps the kind of its gaps.
        """
        units = self._units(np.random.default_rng(seed))
        slope = 0.0 if self.end_rate is None else (self.end_rate - self.rate) / self.duration_s
        if abs(slope) < 1e-12 * self.rate:
            return [float(t) for t in units / self.rate]
        # The stable root of slope / 2 * t^2 + rate * t = unit.
        inner = np.sqrt(np.maximum(self.rate**2 + 2 * slope * units, 0.0))
        return [float(t) for t in 2 * units / (self.rate + inner)]

    def _units(self, rng: np.random.Generator) -> np.ndarray:
        """Arrivals of the process of rate 1, below `expected`."""
        if self.shape is None:
            return np.arange(0, self.expected, dtype=np.float64)
        found: list[np.ndarray] = []
        reached = 0.0
        while reached < self.expected:
            block = reached + np.cumsum(rng.gamma(self.shape, 1.0 / self.shape, size=max(64, int(self.expected))))
            found.append(block)
            reached = float(block[-1])
        units = np.concatenate(found)
        return units[units < self.expected]
