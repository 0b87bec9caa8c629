"""Shares of requests, the sample ratio of the arms, equivalence, and adjustment for many tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, special, stats  # type: ignore[import-untyped]

from server.experiment.stats.samples import Floats, Indices, Interval

Counts = tuple[float, float]
"""Of both arms; a fraction where requests depend on each other and count as fewer."""


def share_difference(hits: Counts, n: Counts, alpha: float) -> Interval:
    """Interval for the share of B less that of A, of independent requests (Newcombe, Statist. Med. 1998, method 10)."""
    if min(n) == 0:
        return Interval(-1.0, 1.0)
    p, q = hits[0] / n[0], hits[1] / n[1]
    a, b = (_wilson(share, m, alpha) for share, m in zip((p, q), n, strict=True))
    return Interval(q - p - math.hypot(q - b.low, a.high - p), q - p + math.hypot(b.high - q, p - a.low))


def _wilson(share: float, n: float, alpha: float) -> Interval:
    """Wilson's interval for one share (J. Am. Statist. Assoc. 1927). scipy's takes whole numbers only."""
    square = float(stats.norm.ppf(1 - alpha / 2)) ** 2
    middle = share + square / (2 * n)
    half = math.sqrt(square * (share * (1 - share) / n + square / (4 * n * n)))
    return Interval((middle - half) / (1 + square / n), (middle + half) / (1 + square / n))


def share_difference_bounds(hits: Counts, n: Counts, alpha: float) -> Interval:
    """Like `share_difference`, valid at all times: the two shares' confidence sequences, alpha / 2 each."""
    a, b = (share_bounds(h, m, alpha / 2) for h, m in zip(hits, n, strict=True))
    return Interval(b.low - a.high, b.high - a.low)


def share_bounds(hits: float, n: float, alpha: float) -> Interval:
    """A confidence sequence for one share: the shares against which a uniform mixture of all others has a likelihood
    ratio below 1 / alpha (Robbins, Ann. Math. Statist. 1970; Ville's inequality)."""
    limit = -math.log(alpha) - float(special.betaln(1 + hits, 1 + n - hits))

    def evidence(share: float) -> float:
        return -hits * math.log(share) - (n - hits) * math.log1p(-share) - limit

    least, most = 1e-12, 1 - 1e-12
    middle = min(most, max(least, hits / n if n else 0.5))
    low = float(optimize.brentq(evidence, least, middle)) if evidence(least) > 0 else 0.0
    high = float(optimize.brentq(evidence, middle, most)) if evidence(most) > 0 else 1.0
    return Interval(low, high)


def chi_square_ratio(counts: Sequence[int], weights: Sequence[float]) -> float:
    """p-value of Pearson's chi-square test that ``counts``, not all 0, follow ``weights``. Valid for one look."""
    shares = np.asarray(weights, float) / sum(weights)
    return float(stats.chisquare(counts, shares * sum(counts)).pvalue)


def sequential_ratio(arms: Indices, weights: Sequence[float], prior: float = 100.0) -> float:
    """p-value, valid at any time, that arms [n >= 1], in order of arrival, follow ``weights``.

    The sequential multinomial test of Lindon & Malek (arXiv 2011.03567): multinomial chances drawn from a Dirichlet
    with ``prior`` * weights against the weights; the inverse of its maximum so far is a p-value by Ville's inequality.
    """
    shares: Floats = np.asarray(weights, np.float64) / sum(weights)
    counts = np.cumsum(arms[:, None] == np.arange(len(shares)), axis=0).astype(np.float64)
    n = np.arange(1.0, len(arms) + 1)
    alphas: Floats = prior * shares
    log_gamma = special.gammaln
    mixed = log_gamma(prior) - log_gamma(prior + n) + np.sum(log_gamma(alphas + counts) - log_gamma(alphas), axis=1)
    evidence = mixed - counts @ np.log(shares)
    return float(min(1.0, np.exp(-np.max(evidence))))


def equivalent(ratio: Callable[[float], Interval], margin: float, alpha: float) -> bool:
    """Whether B / A lies between 1 / (1 + margin) and 1 + margin, at level alpha: two one-sided tests (Schuirmann 1987)
    as one interval of level 1 - 2 alpha. ``ratio`` returns the interval for an alpha; a margin of 0 is never met."""
    low, high = ratio(2 * alpha)
    return 1 / (1 + margin) < low and high < 1 + margin


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values in the order given: reject those <= alpha, and the chance of any false rejection is <= alpha
    however the tests depend on each other (Holm, Scand. J. Statist. 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
