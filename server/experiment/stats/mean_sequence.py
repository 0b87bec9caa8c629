"""Intervals for a ratio of means that hold at all times at once, for many units."""

from __future__ import annotations

import math

from server.experiment.stats.interval import ANY_RATIO, Interval
from server.experiment.stats.mean_comparison import MeanComparison
from server.experiment.stats.quantile_comparison import MIN_UNITS


def mean_ratio_bounds(comparison: MeanComparison, alpha: float, tuned_for: float) -> Interval:
    """The interval for B / A: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas, arXiv
    2103.06476, Theorem 2.2) for b - r a at every r. Holds as the units grow many."""
    n = comparison.n_units
    if n < MIN_UNITS:
        return ANY_RATIO
    rho2 = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / tuned_for
    return comparison.ratio_within(
        math.sqrt(2 * (n * rho2 + 1) / (n * rho2) * math.log(math.sqrt(n * rho2 + 1) / alpha))
    )
