"""Compares a quantile of two arms by the bootstrap of their units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from server.experiment.stats.cumulated_shares import CumulatedShares
from server.experiment.stats.harrell_davis import HarrellDavis
from server.experiment.stats.interval import ANY_RATIO, EVERYTHING, Interval
from server.experiment.stats.order_statistics import quantile_ranks
from server.experiment.stats.resampling import unit_counts
from server.experiment.stats.special import Floats, normal_cdf, normal_ppf, t_cdf, t_ppf
from server.experiment.stats.two_arm_sample import Indices, TwoArmSample

MIN_UNITS = 8
"""With fewer units per arm nothing is concluded."""


@dataclass(frozen=True)
class QuantileComparison:
    """Expanded percentile intervals (Hesterberg, arXiv 1411.5279, section 5.2): the bootstrap's tails are taken where a
    t distribution with units - 1 degrees of freedom would take them.

    Percentile intervals of a quantile need no density and do not change when latencies are transformed; BCa needs the
    jackknife, which is inconsistent for quantiles. The estimate is Harrell & Davis's, in the sample as in the draws.
    """

    a: float
    b: float
    p: float
    draws_a: Floats  # [draws]
    draws_b: Floats
    sizes: tuple[int, int]
    n_units: int  # of the arm with fewer

    def ratio(self, alpha: float) -> Interval:
        if not self._enough(alpha):
            return ANY_RATIO
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(self.draws_a == self.draws_b, 1.0, self.draws_b / self.draws_a)
        return self._percentiles(ratios, alpha)

    def difference(self, alpha: float) -> Interval:
        if not self._enough(alpha):
            return EVERYTHING
        return self._percentiles(self.draws_b - self.draws_a, alpha)

    def of_arm(self, arm: int, alpha: float) -> Interval:
        """Interval for the quantile of one arm (0 or 1)."""
        if not self._enough(alpha):
            return EVERYTHING
        return self._percentiles(self.draws_b if arm else self.draws_a, alpha)

    def p_value(self) -> float:
        if not self._enough(0.05):
            return 1.0
        draws = len(self.draws_a)
        below = (1 + np.count_nonzero(self.draws_b <= self.draws_a)) / (draws + 1)
        above = (1 + np.count_nonzero(self.draws_b >= self.draws_a)) / (draws + 1)
        z = normal_ppf(min(0.5, below, above))
        return min(1.0, 2 * t_cdf(z / self._stretch, self.n_units - 1))

    def _percentiles(self, draws: Floats, alpha: float) -> Interval:
        tail = normal_cdf(self._stretch * t_ppf(alpha / 2, self.n_units - 1))
        low = np.quantile(draws, tail, method="lower")
        high = np.quantile(draws, 1 - tail, method="higher")
        return Interval(float(low), float(high))

    @property
    def _stretch(self) -> float:
        return math.sqrt(self.n_units / (self.n_units - 1))

    def _enough(self, alpha: float) -> bool:
        if self.n_units < MIN_UNITS:
            return False
        ranks = [(n, quantile_ranks(n, self.p, alpha)) for n in self.sizes]
        return all(low >= 1 and high <= n for n, (low, high) in ranks)


def compare_quantiles(
    sample: TwoArmSample, probabilities: list[float], draws: int, rng: np.random.Generator
) -> list[QuantileComparison]:
    """One comparison per probability, from the same draws."""
    drawn = np.full((2, len(probabilities), draws), math.nan)
    points = np.full((2, len(probabilities)), math.nan)
    if all(sample.sizes):
        ordered = [_sorted(*arm) for arm in zip(sample.values, sample.units, strict=True)]
        estimators = [[HarrellDavis(values, p) for p in probabilities] for values, _ in ordered]
        for arm, (values, _) in enumerate(ordered):
            once = CumulatedShares.of(np.ones((1, len(values)), np.int64))
            points[arm] = [one.of(once)[0] for one in estimators[arm]]
        done = 0
        for counts in unit_counts(sample, draws, rng):
            for arm, (_, units) in enumerate(ordered):
                shares = CumulatedShares.of(counts[:, units])
                drawn[arm, :, done : done + len(counts)] = [one.of(shares) for one in estimators[arm]]
            done += len(counts)
    fewest = min(int(np.count_nonzero(units)) for units in sample.present())
    return [
        QuantileComparison(float(points[0, i]), float(points[1, i]), p, drawn[0, i], drawn[1, i], sample.sizes, fewest)
        for i, p in enumerate(probabilities)
    ]


def _sorted(values: Floats, units: Indices) -> tuple[Floats, Indices]:
    order = np.argsort(values, kind="stable")
    return values[order], units[order]
