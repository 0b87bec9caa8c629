"""Quantiles of two arms: estimates, bootstrap comparison, and always-valid bounds."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats  # type: ignore[import-untyped]

from server.experiment.stats.samples import (
    ANY_RATIO,
    EVERYTHING,
    Counts,
    Floats,
    Indices,
    Interval,
    TwoArmSample,
    unit_counts,
)


def band_half_width(n: int, alpha: float) -> float:
    """Half the height of a band that contains the whole distribution function of n independent values with chance >= 1
    - alpha (Dvoretzky, Kiefer & Wolfowitz; constant of Massart, Ann. Probab. 1990)."""
    return min(1.0, math.sqrt(math.log(2 / alpha) / (2 * n))) if n > 0 else 1.0


def cumulated_shares(counts: Counts | Floats) -> Floats:
    """The shares [draws, n] of the values up to each one, from how often each was drawn, or its weight: [draws, n], not
    all 0 in a draw."""
    running = np.cumsum(counts, axis=1, dtype=np.float64)
    return np.asarray(running / running[:, -1:])


_REACH = 7.0  # standard deviations from p, beyond which no value weighs
_GRID = 512


def harrell_davis(ordered: Floats, shares: Floats, p: float) -> Floats:
    """The p-quantile of each draw [draws] as a weighted mean of order statistics (Harrell & Davis, Biometrika 1982):
    value i of n weighs what a Beta((n + 1) p, (n + 1) (1 - p)) puts between (i - 1) / n and i / n.

    Differences of two such quantiles vary less than those of single order statistics where the arms go together, and
    ties do no harm to their bootstrap (Wilcox & Erceg-Hurn, J. Appl. Stat. 2012).

    ordered: values [n], ascending, n >= 1. shares: [draws, n], as `cumulated_shares` returns them.
    """
    n = len(ordered)
    spread = _REACH * math.sqrt(p * (1 - p) / (n + 2)) + _REACH / (n + 2)
    low, high = max(0.0, p - spread), min(1.0, p + spread)
    grid = np.linspace(low, high, _GRID)
    weights: Floats = special.betainc((n + 1) * p, (n + 1) * (1 - p), grid)
    weights[0], weights[-1] = 0.0, 1.0
    # Only columns that have weight in some draw are looked at.
    first = bisect_right(range(n), low, key=lambda i: shares[:, i].max())
    last = min(bisect_left(range(n), high, key=lambda i: shares[:, i].min()), n - 1)
    upto = np.interp(shares[:, first : last + 1], grid, weights)
    upto[:, -1] = 1.0
    values = ordered[first : last + 1]
    return np.asarray(upto @ values - upto[:, :-1] @ values[1:])


MIN_UNITS = 8
"""Fewer units per arm give no conclusion."""


@dataclass(frozen=True)
class QuantileComparison:
    """Expanded percentile intervals (Hesterberg, arXiv 1411.5279, section 5.2): tails of the bootstrap at the levels of
    a t distribution with units - 1 degrees of freedom.

    Percentile intervals of a quantile need no density and are invariant to transformations of latencies; BCa needs the
    jackknife, which is inconsistent for quantiles. The estimate is Harrell & Davis's, in the sample and in the draws.
    """

    a: float
    b: float
    p: float
    draws_a: Floats  # [draws]
    draws_b: Floats
    sizes: tuple[int, int]
    n_units: int  # of the arm with fewer

    def ratio(self, alpha: float) -> Interval:
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(self.draws_a == self.draws_b, 1.0, self.draws_b / self.draws_a)
        return self._percentiles(ratios, alpha, ANY_RATIO)

    def difference(self, alpha: float) -> Interval:
        return self._percentiles(self.draws_b - self.draws_a, alpha, EVERYTHING)

    def of_arm(self, arm: int, alpha: float) -> Interval:
        """Interval for the quantile of one arm (0 or 1)."""
        return self._percentiles(self.draws_b if arm else self.draws_a, alpha, EVERYTHING)

    def p_value(self) -> float:
        if not self._enough(0.05):
            return 1.0
        draws = len(self.draws_a)
        below = (1 + np.count_nonzero(self.draws_b <= self.draws_a)) / (draws + 1)
        above = (1 + np.count_nonzero(self.draws_b >= self.draws_a)) / (draws + 1)
        z = stats.norm.ppf(min(0.5, below, above))
        return min(1.0, float(2 * stats.t.cdf(z / self._stretch, self.n_units - 1)))

    def _percentiles(self, draws: Floats, alpha: float, unbounded: Interval) -> Interval:
        if not self._enough(alpha):
            return unbounded
        tail = stats.norm.cdf(self._stretch * stats.t.ppf(alpha / 2, self.n_units - 1))
        low = np.quantile(draws, tail, method="lower")
        high = np.quantile(draws, 1 - tail, method="higher")
        return Interval(float(low), float(high))

    @property
    def _stretch(self) -> float:
        return math.sqrt(self.n_units / (self.n_units - 1))

    def _enough(self, alpha: float) -> bool:
        """Whether the values of each arm bound its quantile: the chance that all lie on one side is below alpha / 2."""
        chances = [max(self.p**n, (1 - self.p) ** n) for n in self.sizes]
        return self.n_units >= MIN_UNITS and max(chances) < alpha / 2


def compare_quantiles(
    sample: TwoArmSample, probabilities: list[float], draws: int, rng: np.random.Generator
) -> list[QuantileComparison]:
    """One comparison per probability, from the same draws."""
    drawn = np.full((2, len(probabilities), draws), math.nan)
    points = np.full((2, len(probabilities)), math.nan)
    if all(sample.sizes):
        ordered = [_sorted(*arm) for arm in zip(sample.values, sample.units, strict=True)]
        for arm, (values, _) in enumerate(ordered):
            once = cumulated_shares(np.ones((1, len(values))))
            points[arm] = [harrell_davis(values, once, p)[0] for p in probabilities]
        done, (has_a, has_b) = 0, sample.present()
        for every in unit_counts(sample, draws, rng):
            # A draw without any unit of one arm has no quantile to compare, so it is left out.
            counts = every[every[:, has_a].any(axis=1) & every[:, has_b].any(axis=1)]
            if not len(counts):
                continue
            for arm, (values, units) in enumerate(ordered):
                shares = cumulated_shares(counts[:, units])
                drawn[arm, :, done : done + len(counts)] = [harrell_davis(values, shares, p) for p in probabilities]
            done += len(counts)
        drawn = drawn[:, :, :done]
    fewest = min(sample.units_by_arm())
    return [
        QuantileComparison(float(points[0, i]), float(points[1, i]), p, drawn[0, i], drawn[1, i], sample.sizes, fewest)
        for i, p in enumerate(probabilities)
    ]


def _sorted(values: Floats, units: Indices) -> tuple[Floats, Indices]:
    order = np.argsort(values, kind="stable")
    return values[order], units[order]


def below_bounds(time: float, p: float, alpha: float, tuned_for: float) -> tuple[float, float]:
    """Bounds (low, high) that the number of values at or below the p-quantile satisfies at all times together with
    chance >= 1 - alpha.

    After Howard & Ramdas 2022 (arXiv 1906.09712, Theorem 1b): Ville's inequality for the likelihood ratio of a
    Bernoulli(theta) against Bernoulli(p), theta drawn from a Beta around p. Here theta is drawn on one side of p, with
    alpha / 2 for each, so that ties in the values keep the bound; the ratio is convex in the observation, so a mean of
    indicators may replace an indicator. ``tuned_for``: the time at which the bounds are tightest.
    """
    prior = max(1.0, tuned_for / (2 * math.log(2 / alpha) + math.log(1 + 2 * math.log(2 / alpha))))
    return _least(time, p, alpha / 2, prior), time - _least(time, 1 - p, alpha / 2, prior)


def _least(time: float, p: float, alpha: float, prior: float) -> float:
    """The smallest sum that is not significantly below p * time; -1 if there is none."""
    a, b = prior * p, prior * (1 - p)

    def log_mixture(hits: float, rest: float) -> float:
        """The log likelihood of so many values below and above, theta <= p drawn from the Beta."""
        return float(special.betaln(a + hits, b + rest) + np.log(special.betainc(a + hits, b + rest, p)))

    limit = log_mixture(0.0, 0.0) - math.log(alpha)

    def excess(hits: float) -> float:
        rest = time - hits
        return log_mixture(hits, rest) - hits * math.log(p) - rest * math.log1p(-p) - limit

    return float(optimize.brentq(excess, 0.0, time * p)) if excess(0.0) > 0 else -1.0


def quantile_bounds(values: Floats, units: Indices, p: float, alpha: float, tuned_for: float) -> Interval:
    """The interval for the p-quantile of values [n] of units, for a distribution in which all units have equal weight.

    Units (not values) must be identically distributed and independent of the past; time is their number.
    """
    if len(values) == 0:
        return EVERYTHING
    sizes = np.bincount(units)
    time = float(np.count_nonzero(sizes))
    ordered, units = _sorted(values, units)
    running = np.cumsum(1 / sizes[units])
    least, most = below_bounds(time, p, alpha, tuned_for)
    # A bound is too small if fewer than `least` values are at or below it, too large if more than `most` are below.
    first = int(np.searchsorted(running, least - 1e-9))
    last = int(np.searchsorted(running, most + 1e-9, side="right"))
    low = float(ordered[first]) if least > 0 else -math.inf
    high = float(ordered[last]) if last < len(values) else math.inf
    return Interval(low, high)


def unit_quantiles(sample: TwoArmSample, p: float) -> tuple[float, float]:
    """Estimates of the quantiles that `quantile_ratio_bounds` bounds: all units of an arm have equal weight."""
    if not all(sample.sizes):
        return math.nan, math.nan
    found = []
    for values, units in zip(sample.values, sample.units, strict=True):
        ordered, units_of = _sorted(values, units)
        weights = 1 / np.bincount(units_of)[units_of]
        found.append(float(harrell_davis(ordered, cumulated_shares(weights[None, :]), p)[0]))
    return found[0], found[1]


def quantile_ratio_bounds(sample: TwoArmSample, p: float, alpha: float, tuned_for: float) -> Interval:
    """The interval for the ratio B / A of quantiles of values >= 0, valid at all times: alpha / 2 for each arm."""
    a, b = (
        quantile_bounds(values, units, p, alpha / 2, tuned_for)
        for values, units in zip(sample.values, sample.units, strict=True)
    )
    if a.high <= 0 or not all(sample.sizes):
        return ANY_RATIO
    low = max(0.0, b.low) / a.high
    high = b.high / a.low if a.low > 0 else math.inf
    return Interval(low, high)
