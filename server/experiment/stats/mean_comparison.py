"""Compares the mean of two arms by the studentised bootstrap of their units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from server.experiment.stats.interval import ANY_RATIO, EVERYTHING, Interval
from server.experiment.stats.quantile_comparison import MIN_UNITS
from server.experiment.stats.resampling import Counts, unit_counts
from server.experiment.stats.special import Floats
from server.experiment.stats.two_arm_sample import TwoArmSample


@dataclass(frozen=True)
class MeanComparison:
    """Bootstrap-t intervals (Efron & Tibshirani 1993, chapter 12), the ratio's on the logarithm.

    Means of latencies are skewed; studentising corrects for it to second order, which the percentile interval does not.
    """

    a: float
    b: float
    errors: tuple[float, float]  # of the logarithm of the ratio, and of the difference
    pivots: tuple[Floats, Floats]  # the same, studentised, in each draw
    n_units: int

    def ratio(self, alpha: float) -> Interval:
        if self.n_units < MIN_UNITS or min(self.a, self.b) <= 0:
            return ANY_RATIO
        low, high = self._interval(0, math.log(self.b / self.a), alpha)
        return Interval(math.exp(min(low, 700)), math.exp(min(high, 700)))

    def difference(self, alpha: float) -> Interval:
        if self.n_units < MIN_UNITS:
            return EVERYTHING
        return self._interval(1, self.b - self.a, alpha)

    def p_value(self) -> float:
        error, pivots = self.errors[1], self.pivots[1]
        if self.n_units < MIN_UNITS or error == 0:
            return 1.0 if self.a == self.b or self.n_units < MIN_UNITS else 0.0
        seen = (self.b - self.a) / error
        above = np.count_nonzero(pivots >= seen)
        below = np.count_nonzero(pivots <= seen)
        return min(1.0, float(2 * (1 + min(above, below)) / (len(pivots) + 1)))

    def _interval(self, kind: int, estimate: float, alpha: float) -> Interval:
        error, pivots = self.errors[kind], self.pivots[kind]
        if error == 0:
            return Interval(estimate, estimate)
        low = np.quantile(pivots, alpha / 2, method="lower")
        high = np.quantile(pivots, 1 - alpha / 2, method="higher")
        return Interval(float(estimate - high * error), float(estimate - low * error))


def compare_means(sample: TwoArmSample, draws: int, rng: np.random.Generator) -> MeanComparison:
    """The comparison of the means over all values; a unit's part in it is its values' sum and number."""
    n = sample.n_units
    sums: Floats = np.stack([np.bincount(u, v, n) for u, v in zip(sample.units, sample.values, strict=True)]).astype(
        np.float64
    )
    sizes: Floats = np.stack([np.bincount(u, minlength=n) for u in sample.units]).astype(np.float64)
    fewest = min(int(np.count_nonzero(units)) for units in sample.present())
    if not all(sample.sizes):
        nothing = np.zeros(1)
        return MeanComparison(math.nan, math.nan, (0.0, 0.0), (nothing, nothing), 0)
    strata = max(1, sum(len(units) > 0 for units in sample.strata()))
    means, logs, differences, log_errors, errors = _linearised(np.ones((1, n), np.int64), sums, sizes, strata)
    pivots: list[list[Floats]] = [[], []]
    for counts in unit_counts(sample, draws, rng):
        _, log, difference, log_error, error = _linearised(counts, sums, sizes, strata)
        with np.errstate(divide="ignore", invalid="ignore"):
            pivots[0].append(np.nan_to_num((log - logs[0]) / log_error))
            pivots[1].append(np.nan_to_num((difference - differences[0]) / error))
    return MeanComparison(
        float(means[0, 0]),
        float(means[1, 0]),
        (float(log_errors[0]), float(errors[0])),
        (np.concatenate(pivots[0]), np.concatenate(pivots[1])),
        fewest,
    )


def _linearised(
    counts: Counts, sums: Floats, sizes: Floats, strata: int
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Means [2, draws], log ratio, difference, and the standard errors of both, of units drawn ``counts`` [draws, n]
    times. A ratio estimator's error is that of its linearisation over the units (Cochran 1977, 2.11)."""
    weights = counts.astype(float)
    totals, numbers = sums @ weights.T, sizes @ weights.T
    with np.errstate(divide="ignore", invalid="ignore"):
        means = totals / numbers
        # residual of unit u in arm k, for draw d: (sums[k, u] - means[k, d] * sizes[k, u]) / numbers[k, d]
        first, second = ((sums[k] - means[k][:, None] * sizes[k]) / numbers[k][:, None] for k in (0, 1))
        log = np.log(means[1] / means[0])
        relative = second / means[1][:, None] - first / means[0][:, None]
    n = max(2, sums.shape[1] // strata)
    scale = math.sqrt(n / (n - 1))
    log_error = scale * np.sqrt(np.sum(weights * relative**2, axis=1))
    error = scale * np.sqrt(np.sum(weights * (second - first) ** 2, axis=1))
    return means, log, means[1] - means[0], log_error, error
