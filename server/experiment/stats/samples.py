"""Samples of two arms, and the dependence of their units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """From ``low`` to ``high``, inclusive; infinite if the data give no bound."""

    low: float
    high: float


EVERYTHING = Interval(-math.inf, math.inf)
ANY_RATIO = Interval(0.0, math.inf)


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TwoArmSample:
    """Values of arms A and B, and the unit (pair, time block, session) of each.

    ``values`` are two arrays [n_a] and [n_b], ``units`` two of the same lengths with numbers 0 .. n_units - 1 in time
    order. Different units are independent, except as stated to `merged`.
    """

    values: tuple[Floats, Floats]
    units: tuple[Indices, Indices]
    n_units: int

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.values[0]), len(self.values[1])

    def present(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Per arm, which units [n_units] have values."""
        a, b = (np.bincount(units, minlength=self.n_units) > 0 for units in self.units)
        return a, b

    def units_by_arm(self) -> tuple[int, int]:
        """Per arm, how many units have values."""
        a, b = (int(np.count_nonzero(units)) for units in self.present())
        return a, b

    def strata(self) -> list[Indices]:
        """The groups of units to resample separately: by arm if no unit has both arms, else one group."""
        a, b = self.present()
        if np.any(a & b):
            return [np.flatnonzero(a | b)]
        return [np.flatnonzero(a), np.flatnonzero(b)]

    def merged(self, length: int) -> TwoArmSample:
        """The sample with ``length`` consecutive units as one: non-overlapping blocks (Carlstein 1986)."""
        a, b = (units // length for units in self.units)
        return TwoArmSample(self.values, (a, b), -(-self.n_units // length))


_MIN_BLOCKS = 10  # that must remain


def block_length(series: Floats) -> int:
    """Length of blocks for a dependent series [n] (Politis & White 2004 with the correction of Patton, Politis & White
    2009, circular blocks), doubled; at least 1, with at least 10 blocks. The published length minimises the mean
    square error, but underestimates the variance; coverage needs longer blocks, and a t quantile for their number."""
    n = len(series)
    limit = n // _MIN_BLOCKS
    if limit <= 1 or np.ptp(series) == 0:
        return 1
    centred = series - series.mean()
    ahead = max(5, math.ceil(math.sqrt(math.log10(n))))
    longest = min(n - 1, math.ceil(math.sqrt(n)) + ahead)
    cov = np.array([np.dot(centred[: n - k], centred[k:]) / n for k in range(longest + 1)])
    small = np.abs(cov[1:] / cov[0]) < 2 * math.sqrt(math.log10(n) / n)
    last = next((m for m in range(longest - ahead + 1) if small[m : m + ahead].all()), None)
    if last == 0:  # no correlation: the formula would add noise
        return 1
    width = min(2 * (last if last is not None else longest), longest)
    lags = np.arange(1, width + 1)
    flat_top = np.clip(2 * (1 - lags / width), 0, 1)
    slope = 2 * float(np.sum(flat_top * lags * cov[lags]))
    level = float(cov[0] + 2 * np.sum(flat_top * cov[lags]))
    if level <= 0:
        return 1
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    return max(1, min(limit, math.ceil(2 * best)))


def sample_block_length(sample: TwoArmSample, p: float | None) -> int:
    """`block_length` of the units' [n_units] contributions to the comparison of p-quantiles, or of means (p None)."""
    series = np.zeros(sample.n_units)
    for values, units, sign in zip(sample.values, sample.units, (-1.0, 1.0), strict=True):
        if len(values) == 0:
            return 1
        if p is None:
            parts = (values - values.mean()) / (abs(values.mean()) or 1.0)
        else:
            parts = p - (values <= np.quantile(values, p, method="inverted_cdf"))
        series += sign * np.bincount(units, parts, sample.n_units) / len(values)
    return block_length(series)


Counts = npt.NDArray[np.int64]

_CHUNK = 1 << 21  # elements


def unit_counts(sample: TwoArmSample, draws: int, rng: np.random.Generator) -> Iterator[Counts]:
    """How often each unit is drawn: ``draws`` rows [n_units], in chunks of bounded size. The bootstrap of units (Efron
    1979), within each stratum: a row sums to the number of units."""
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
