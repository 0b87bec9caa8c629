"""Means of two arms: comparison, always-valid bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from server.experiment.stats.quantiles import MIN_UNITS
from server.experiment.stats.samples import ANY_RATIO, EVERYTHING, Interval, TwoArmSample


@dataclass(frozen=True)
class MeanComparison:
    """Student's t with errors over units, and Fieller's interval for the ratio (Fieller, JRSS B 1954), which is the
    same test at every ratio.

    The studentised bootstrap covers less here: the skewness of both arms cancels in their difference, and the rest in a
    heavy-tailed sample is noise (simulated on lognormal and Pareto values: 7 to 11 % misses at 5 %, against 3 to 5.5 %
    here).
    """

    a: float
    b: float
    variances: tuple[float, float]  # of the two means
    covariance: float
    n_units: int  # of the arm with fewer

    def ratio(self, alpha: float) -> Interval:
        if self.n_units < MIN_UNITS:
            return ANY_RATIO
        return self.ratio_within(self._critical(alpha))

    def ratio_within(self, critical: float) -> Interval:
        """All r >= 0 with |b - r a| <= critical times the error of b - r a."""
        square = critical**2
        first = self.a**2 - square * self.variances[0]
        middle = self.a * self.b - square * self.covariance
        last = self.b**2 - square * self.variances[1]
        if self.a <= 0 or first <= 0:
            return ANY_RATIO
        root = math.sqrt(max(0.0, middle**2 - first * last))
        return Interval(max(0.0, (middle - root) / first), (middle + root) / first)

    def difference(self, alpha: float) -> Interval:
        if self.n_units < MIN_UNITS:
            return EVERYTHING
        half = self._critical(alpha) * self._error
        return Interval(self.b - self.a - half, self.b - self.a + half)

    def p_value(self) -> float:
        if self.n_units < MIN_UNITS or self.a == self.b:
            return 1.0
        if self._error == 0:
            return 0.0
        return float(2 * stats.t.cdf(-abs(self.b - self.a) / self._error, self.n_units - 1))

    @property
    def _error(self) -> float:
        """Of b - a; rounding must not make its square negative."""
        return math.sqrt(max(0.0, sum(self.variances) - 2 * self.covariance))

    def _critical(self, alpha: float) -> float:
        return float(-stats.t.ppf(alpha / 2, self.n_units - 1))


def compare_means(sample: TwoArmSample) -> MeanComparison:
    """The comparison of the means over all values. Units may have any number of values: errors are those of the
    jackknife over units, which is conservative (Efron & Stein, Ann. Statist. 1981). The linearised error is too small
    where a few units have most values (simulated on 20 keys of Pareto sizes: 15 % misses at 5 %, against 6 % here)."""
    if not all(sample.sizes):
        return MeanComparison(math.nan, math.nan, (0.0, 0.0), 0.0, 0)
    a, b = (float(values.mean()) for values in sample.values)
    # How each mean rises when a unit is left out; nothing is left of an arm of one unit.
    first, second = (
        np.bincount(units, mean - values, sample.n_units)
        / np.maximum(1, len(values) - np.bincount(units, minlength=sample.n_units))
        for values, units, mean in zip(sample.values, sample.units, (a, b), strict=True)
    )
    counts = sample.units_by_arm()
    shares = [1 - 1 / n for n in counts]
    variances = (float(first @ first) * shares[0], float(second @ second) * shares[1])
    return MeanComparison(a, b, variances, float(first @ second) * min(shares), min(counts))


def design_effect(sample: TwoArmSample) -> float:
    """How many values of a unit count as one: the variance of the two means over units, relative to that of independent
    values (Kish, Survey Sampling, 1965); at least 1. Of few units, whose variance says little: a unit counts as one."""
    counts = sample.units_by_arm()
    if 0 < min(counts) < MIN_UNITS:
        return sum(sample.sizes) / sum(counts)
    independent = sum(values.var() / len(values) for values in sample.values if len(values))
    return max(1.0, sum(compare_means(sample).variances) / independent) if independent else 1.0


def mean_ratio_bounds(comparison: MeanComparison, alpha: float, tuned_for: float) -> Interval:
    """The interval for B / A: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas, arXiv
    2103.06476, Theorem 2.2) for b - r a at every r. Valid for many units."""
    n = comparison.n_units
    if n < MIN_UNITS:
        return ANY_RATIO
    rho2 = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / tuned_for
    return comparison.ratio_within(
        math.sqrt(2 * (n * rho2 + 1) / (n * rho2) * math.log(math.sqrt(n * rho2 + 1) / alpha))
    )
