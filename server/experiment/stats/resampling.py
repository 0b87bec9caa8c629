"""Draws of units with replacement, as counts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from server.experiment.stats.two_arm_sample import TwoArmSample

Counts = npt.NDArray[np.int64]

_CHUNK = 1 << 21


def unit_counts(sample: TwoArmSample, draws: int, rng: np.random.Generator) -> Iterator[Counts]:
    """How often each unit is drawn: ``draws`` rows [n_units], in chunks of a bounded size. The bootstrap of units
    (Efron 1979), within each stratum of the sample: each row sums to the number of units."""
    widest = max(sample.n_units, *sample.sizes, 1)
    rows = max(1, min(draws, _CHUNK // widest))
    strata = sample.strata()
    for begin in range(0, draws, rows):
        counts = np.zeros((min(rows, draws - begin), sample.n_units), np.int64)
        for units in strata:
            counts[:, units] = _counts(len(counts), len(units), rng)
        yield counts


def _counts(rows: int, n: int, rng: np.random.Generator) -> Counts:
    """How often each of n is drawn in n draws; [rows, n]."""
    drawn = rng.integers(0, max(1, n), (rows, n)) + n * np.arange(rows)[:, None]
    return np.bincount(drawn.ravel(), minlength=rows * n).reshape(rows, n)
