"""Arrival times without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from server.experiment.config.load import Load

_DRAWN = 1024


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds after the beginning, ascending, the same for the same load; 0 for all where it is a closed loop.

    Gaps are even, or gamma distributed (of shape 1 for a Poisson process) with a mean of 1 / rate."""
    if load.rate is None:
        return itertools.repeat(0.0)
    if load.arrivals == "constant":
        rate = load.rate
        return (number / rate for number in itertools.count())
    return _random_times(load.rate, 1.0 if load.arrivals == "poisson" else load.shape, load.seed)


def _random_times(rate: float, shape: float, seed: int) -> Iterator[float]:
    rng, now = np.random.default_rng(seed), 0.0
    while True:
        for gap in rng.gamma(shape, 1 / (shape * rate), _DRAWN):
            now += float(gap)
            yield now
