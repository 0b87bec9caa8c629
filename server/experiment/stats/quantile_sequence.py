"""Intervals for a quantile that hold at all times at once: look at every record, stop when you like."""

from __future__ import annotations

import math

import numpy as np

from server.experiment.stats.interval import ANY_RATIO, Interval
from server.experiment.stats.special import Floats, log_beta, log_beta_cdf
from server.experiment.stats.two_arm_sample import Indices, TwoArmSample


def below_bounds(times: Floats, p: float, alpha: float, tuned_for: float) -> tuple[Floats, Floats]:
    """Bounds (low, high), each [times], that the number of values at or below the p-quantile keeps to for all times
    together with chance >= 1 - alpha.

    After Howard & Ramdas 2022 (arXiv 1906.09712, Theorem 1b): Ville's inequality for the likelihood ratio of a
    Bernoulli(theta) against Bernoulli(p), theta drawn from a Beta around p. Ours is drawn on one side of p, with
    alpha / 2 for each, so that ties in the values can not break it; and as the ratio is convex in the observation, a
    mean of indicators may take the place of one indicator. ``tuned_for`` is the time at which the bounds are tightest.
    """
    prior = max(1.0, tuned_for / (2 * math.log(2 / alpha) + math.log(1 + 2 * math.log(2 / alpha))))
    low = _least(times, p, alpha / 2, prior)
    high = times - _least(times, 1 - p, alpha / 2, prior)
    return low, high


def _least(times: Floats, p: float, alpha: float, prior: float) -> Floats:
    """The smallest sums [times] that are not significantly below p * time; -1 where none is."""
    a, b = prior * p, prior * (1 - p)
    base = log_beta(a, b) + log_beta_cdf(p, a, b)

    def evidence(sums: Floats) -> Floats:
        rest = times - sums
        mixed = log_beta(a + sums, b + rest) + log_beta_cdf(p, a + sums, b + rest)
        return np.asarray(mixed - base - sums * math.log(p) - rest * math.log1p(-p))

    limit = math.log(1 / alpha)
    low, high = np.zeros_like(times), times * p
    for _ in range(40):
        middle = (low + high) / 2
        strong = evidence(middle) > limit
        low, high = np.where(strong, middle, low), np.where(strong, high, middle)
    return np.where(evidence(np.zeros_like(times)) > limit, low, -1.0)


def quantile_bounds(values: Floats, units: Indices, p: float, alpha: float, tuned_for: float) -> Interval:
    """The interval for the p-quantile of values [n] of units: of the distribution in which every unit has equal weight.

    Units (not values) must be alike and independent of what went before; time is their number.
    """
    if len(values) == 0:
        return Interval(-math.inf, math.inf)
    sizes = np.bincount(units)
    weights = 1 / sizes[units]
    time = float(np.count_nonzero(sizes))
    order = np.argsort(values, kind="stable")
    running = np.cumsum(weights[order])
    (least,), (most,) = below_bounds(np.array([time]), p, alpha, tuned_for)
    # x is too small when what lies at or below it is less than `least`, too large when what lies below it is more
    # than `most`.
    first = int(np.searchsorted(running, least - 1e-9))
    last = int(np.searchsorted(running, most + 1e-9, side="right"))
    low = float(values[order[first]]) if least > 0 else -math.inf
    high = float(values[order[last]]) if last < len(values) else math.inf
    return Interval(low, high)


def quantile_ratio_bounds(sample: TwoArmSample, p: float, alpha: float, tuned_for: float) -> Interval:
    """The interval for the ratio B / A of quantiles of values >= 0, at all times at once: alpha / 2 for either arm."""
    a, b = (
        quantile_bounds(values, units, p, alpha / 2, tuned_for)
        for values, units in zip(sample.values, sample.units, strict=True)
    )
    if a.high <= 0 or not all(sample.sizes):
        return ANY_RATIO
    low = max(0.0, b.low) / a.high
    high = b.high / a.low if a.low > 0 else math.inf
    return Interval(low, high)
