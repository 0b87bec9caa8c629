"""Exact intervals for one quantile of independent values, whatever their distribution."""

from __future__ import annotations

import math

from server.experiment.stats.interval import Interval
from server.experiment.stats.special import Floats, binomial_ppf


def quantile_ranks(n: int, p: float, alpha: float) -> tuple[int, int]:
    """Ranks (1-based) of the two order statistics that enclose the p-quantile with chance >= 1 - alpha.

    The number of values below a quantile is binomial (David & Nagaraja, Order Statistics, 3rd ed., 7.1); each side gets
    alpha / 2. Rank 0 stands for minus, rank n + 1 for plus infinity: n is too small for a bound on that side. Ties only
    raise the coverage.
    """
    return binomial_ppf(alpha / 2, n, p), binomial_ppf(1 - alpha / 2, n, p) + 1


def quantile_interval(ordered: Floats, p: float, alpha: float) -> Interval:
    """The interval for the p-quantile from values [n] in ascending order."""
    low, high = quantile_ranks(len(ordered), p, alpha)
    return Interval(
        float(ordered[low - 1]) if low >= 1 else -math.inf,
        float(ordered[high - 1]) if high <= len(ordered) else math.inf,
    )


def quantile(ordered: Floats, p: float) -> float:
    """The smallest value with at least a share p of the values [n] at or below it; NaN of nothing."""
    if len(ordered) == 0:
        return math.nan
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(p * len(ordered) - 1e-9) - 1))])
