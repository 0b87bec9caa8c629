"""A smooth estimate of quantiles, for values that were drawn several times each."""

from __future__ import annotations

import math

import numpy as np

from server.experiment.stats.cumulated_shares import CumulatedShares
from server.experiment.stats.special import Floats, beta_cdf

_REACH = 7.0
_GRID = 512


class HarrellDavis:
    """The p-quantile as a weighted mean of order statistics (Harrell & Davis, Biometrika 1982): value i of n weighs
    what a Beta((n + 1) p, (n + 1) (1 - p)) puts between (i - 1) / n and i / n.

    Differences of two such quantiles vary less than those of single order statistics where the arms go together, and
    ties do no harm to their bootstrap (Wilcox & Erceg-Hurn, J. Appl. Stat. 2012).
    """

    def __init__(self, ordered: Floats, p: float) -> None:
        """``ordered``: values [n], ascending, n >= 1."""
        self._ordered = ordered
        n = len(ordered)
        spread = _REACH * math.sqrt(p * (1 - p) / (n + 2)) + _REACH / (n + 2)
        self._low, self._high = max(0.0, p - spread), min(1.0, p + spread)
        self._shares = np.linspace(self._low, self._high, _GRID)
        self._weights = beta_cdf(self._shares, (n + 1) * p, (n + 1) * (1 - p))
        self._weights[0], self._weights[-1] = 0.0, 1.0

    def of(self, shares: CumulatedShares) -> Floats:
        """The estimate in each of the draws [draws]. Only columns that have weight in some draw are looked at."""
        first = int(np.searchsorted(shares.highest, self._low, side="right"))
        last = min(int(np.searchsorted(shares.lowest, self._high)), len(self._ordered) - 1)
        upto = np.interp(shares.shares[:, first : last + 1], self._shares, self._weights)
        upto[:, -1] = 1.0
        values = self._ordered[first : last + 1]
        return np.asarray(upto @ values - upto[:, :-1] @ values[1:])
