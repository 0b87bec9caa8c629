"""How many consecutive units depend on each other."""

from __future__ import annotations

import math

import numpy as np

from server.experiment.stats.special import Floats
from server.experiment.stats.two_arm_sample import TwoArmSample

_MIN_BLOCKS = 10


def block_length(series: Floats) -> int:
    """Length of blocks for a dependent series [n] (Politis & White 2004 with the correction of Patton, Politis & White
    2009, circular blocks), doubled; at least 1, and such that 10 blocks remain. Their length has the least mean square
    error, but its variance is too small; one that covers needs longer blocks, and a t quantile for their small number.
    """
    n = len(series)
    limit = n // _MIN_BLOCKS
    if limit <= 1 or np.ptp(series) == 0:
        return 1
    centred = series - series.mean()
    ahead = max(5, math.ceil(math.sqrt(math.log10(n))))
    longest = min(n - 1, math.ceil(math.sqrt(n)) + ahead)
    cov = np.array([np.dot(centred[: n - k], centred[k:]) / n for k in range(longest + 1)])
    small = np.abs(cov[1:] / cov[0]) < 2 * math.sqrt(math.log10(n) / n)
    last = next((m for m in range(longest - ahead + 1) if small[m : m + ahead].all()), None)
    if last == 0:  # nothing is correlated: what the formula would add is noise
        return 1
    width = min(2 * (last if last is not None else longest), longest)
    lags = np.arange(1, width + 1)
    flat_top = np.clip(2 * (1 - lags / width), 0, 1)
    slope = 2 * float(np.sum(flat_top * lags * cov[lags]))
    level = float(cov[0] + 2 * np.sum(flat_top * cov[lags]))
    if level <= 0:
        return 1
    best = (2 * slope**2 / (4 / 3 * level**2)) ** (1 / 3) * n ** (1 / 3)
    return max(1, min(limit, math.ceil(2 * best)))


def sample_block_length(sample: TwoArmSample, p: float | None) -> int:
    """`block_length` of what the units [n_units] add to the comparison of the arms' p-quantiles, or means (None)."""
    series = np.zeros(sample.n_units)
    for values, units, sign in zip(sample.values, sample.units, (-1.0, 1.0), strict=True):
        if len(values) == 0:
            return 1
        if p is None:
            parts = (values - values.mean()) / (abs(values.mean()) or 1.0)
        else:
            parts = p - (values <= np.quantile(values, p, method="inverted_cdf"))
        series += sign * np.bincount(units, parts, sample.n_units) / len(values)
    return block_length(series)
