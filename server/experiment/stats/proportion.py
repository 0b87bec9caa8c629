"""Intervals for shares of requests, such as those that failed."""

from __future__ import annotations

import math
from collections.abc import Callable

from server.experiment.stats.interval import Interval
from server.experiment.stats.special import beta_ppf, log_beta, normal_ppf


def share_interval(hits: int, n: int, alpha: float) -> Interval:
    """Exact interval for one share (Clopper & Pearson, Biometrika 1934)."""
    low = beta_ppf(alpha / 2, hits, n - hits + 1) if hits > 0 else 0.0
    high = beta_ppf(1 - alpha / 2, hits + 1, n - hits) if hits < n else 1.0
    return Interval(low, high)


def share_difference(hits: tuple[int, int], n: tuple[int, int], alpha: float) -> Interval:
    """Interval for the share of B less that of A, of independent requests (Newcombe, Statist. Med. 1998, method 10)."""
    if min(n) == 0:
        return Interval(-1.0, 1.0)
    p, q = hits[0] / n[0], hits[1] / n[1]
    a, b = (_wilson(h, m, alpha) for h, m in zip(hits, n, strict=True))
    return Interval(q - p - math.hypot(q - b.low, a.high - p), q - p + math.hypot(b.high - q, p - a.low))


def share_difference_bounds(hits: tuple[int, int], n: tuple[int, int], alpha: float) -> Interval:
    """Like `share_difference`, at all times at once: the two shares' sequences, alpha / 2 each."""
    a, b = (share_bounds(h, m, alpha / 2) for h, m in zip(hits, n, strict=True))
    return Interval(b.low - a.high, b.high - a.low)


def share_bounds(hits: int, n: int, alpha: float) -> Interval:
    """A confidence sequence for one share: those shares against which a uniform mixture of all others has a likelihood
    ratio below 1 / alpha (Robbins, Ann. Math. Statist. 1970; Ville's inequality)."""
    limit = -math.log(alpha) - float(log_beta(1 + hits, 1 + n - hits))

    def outside(share: float) -> bool:
        return -hits * math.log(share) - (n - hits) * math.log1p(-share) >= limit

    middle = min(1 - 1e-9, max(1e-9, hits / n if n else 0.5))
    low = _border(outside, middle, 1e-12) if hits else 0.0
    high = _border(outside, middle, 1 - 1e-12) if hits < n else 1.0
    return Interval(low, high)


def _border(outside: Callable[[float], bool], inner: float, outer: float) -> float:
    """Where ``outside`` becomes true on the way from ``inner`` to ``outer``; ``outer`` where it does not."""
    if not outside(outer):
        return outer
    for _ in range(60):
        middle = (inner + outer) / 2
        inner, outer = (inner, middle) if outside(middle) else (middle, outer)
    return outer


def _wilson(hits: int, n: int, alpha: float) -> Interval:
    """Wilson's score interval (JASA 1927)."""
    z = normal_ppf(1 - alpha / 2)
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))
