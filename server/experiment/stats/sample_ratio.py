"""Did the arms get the shares they were to get?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from server.experiment.stats.special import Floats, chi2_sf, log_gamma
from server.experiment.stats.two_arm_sample import Indices


def chi_square_ratio(counts: Sequence[int], weights: Sequence[float]) -> float:
    """p-value of Pearson's chi-square test that ``counts`` follow ``weights``; 1 of no counts. For one look."""
    total = sum(counts)
    if total == 0:
        return 1.0
    expected = np.asarray(weights, float) / sum(weights) * total
    statistic = float(np.sum((np.asarray(counts) - expected) ** 2 / expected))
    return chi2_sf(statistic, len(counts) - 1)


def sequential_ratio(arms: Indices, weights: Sequence[float], prior: float = 100.0) -> float:
    """p-value that holds at any time, from the arms [n] of units in the order in which they came.

    The sequential multinomial test of Lindon & Malek (arXiv 2011.03567): multinomial chances drawn from a Dirichlet
    with ``prior`` * weights against the weights; its inverse, at its greatest so far, is a p-value by Ville's
    inequality.
    """
    if len(arms) == 0:
        return 1.0
    shares: Floats = np.asarray(weights, np.float64) / sum(weights)
    counts = np.cumsum(arms[:, None] == np.arange(len(shares)), axis=0).astype(np.float64)
    n = np.arange(1.0, len(arms) + 1)
    alphas: Floats = prior * shares
    mixed = log_gamma(prior) - log_gamma(prior + n) + np.sum(log_gamma(alphas + counts) - log_gamma(alphas), axis=1)
    evidence = mixed - counts @ np.log(shares)
    return float(min(1.0, np.exp(-np.max(evidence))))
