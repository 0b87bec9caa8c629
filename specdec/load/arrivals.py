"""Arrival processes, and the block size of hashed prompts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specdec.errors import ConfigError

LEAST_SHAPE = 0.001  # of gamma gaps; about 1 / shape requests arrive at once, more than fit into memory
MAX_ARRIVALS = 1_000_000  # a list of their requests fits into memory
BLOCK_TOKENS = 64  # tokens of one hashed block of a recorded prompt: a page of the KV cache


def shape_of(name: str, gamma: float) -> float | None:
    """The ``shape`` of `Arrivals` that `constant`, `poisson` or `gamma` means; of the last it is ``gamma``."""
    return {"constant": None, "poisson": 1.0, "gamma": gamma}[name]


def unit_arrivals(shape: float | None, seed: int) -> Iterator[float]:
    """Arrivals of the process of rate 1, ascending, without end; a function of ``seed``. shape: as of `Arrivals`."""
    if shape is None:
        return itertools.count(0.0)
    rng = np.random.default_rng(seed)
    return itertools.accumulate(rng.gamma(shape, 1.0 / shape) for _ in itertools.repeat(None))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival process.

    Raises:
        ConfigError: the shape is too low, or more than `MAX_ARRIVALS` requests would arrive.
    """

    rate: float
    """Requests per second."""
    duration_s: float
    shape: float | None = 1.0
    """Shape of the gamma distribution of gaps, in units of the mean gap, at least `LEAST_SHAPE`: 1 is a Poisson
    process, lower values come in bursts. None: even spacing."""

    def __post_init__(self) -> None:
        if self.shape is not None and not LEAST_SHAPE <= self.shape < math.inf:
            raise ConfigError(f"arrivals: shape must be at least {LEAST_SHAPE}, not {self.shape}")
        if self.expected > MAX_ARRIVALS:
            raise ConfigError(
                f"arrivals: rate {self.rate:g} for a duration of {self.duration_s:g} s makes {self.expected:.3g} "
                f"requests; at most {MAX_ARRIVALS:,} are possible"
            )

    @property
    def expected(self) -> float:
        """Mean number of arrivals."""
        return self.rate * self.duration_s

    def offsets(self, seed: int) -> list[float]:
        """Seconds after the start, ascending, in [0, duration_s); a function of ``seed``."""
        within = itertools.takewhile(lambda unit: unit < self.expected, unit_arrivals(self.shape, seed))
        return [unit / self.rate for unit in within]
