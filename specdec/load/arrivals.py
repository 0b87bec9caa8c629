"""Arrival processes, and the block size of hashed prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specdec.errors import ConfigError

BLOCK_TOKENS = 64  # tokens of one hashed block of a recorded prompt: a page of the KV cache


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process.

    Raises:
        ConfigError: a figure is out of range.
    """

    rate: float
    """Requests per second."""
    duration_s: float
    shape: float | None = 1.0
    """Shape of the gamma distribution of gaps, in units of the mean gap: 1 is a Poisson process, lower values
    come in bursts. None: even spacing."""

    def __post_init__(self) -> None:
        for name in ("rate", "duration_s", "shape"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"arrivals: {name} must be positive, not {value}")

    @property
    def expected(self) -> float:
        """Mean number of arrivals."""
        return self.rate * self.duration_s

    def offsets(self, seed: int) -> list[float]:
        """Seconds after the start, ascending, in [0, duration_s); a function of ``seed``."""
        return [float(t) for t in self._units(np.random.default_rng(seed)) / self.rate]

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
