"""Which share of what was drawn lies at or below each value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.experiment.stats.resampling import Counts
from server.experiment.stats.special import Floats


@dataclass(frozen=True)
class CumulatedShares:
    """``shares`` [draws, n] over values in ascending order; per value their least and greatest over the draws [n]."""

    shares: Floats
    lowest: Floats
    highest: Floats

    @classmethod
    def of(cls, counts: Counts) -> CumulatedShares:
        """From how often each value was drawn: [draws, n], at least one per draw."""
        running = np.cumsum(counts, axis=1)
        shares = running / running[:, -1:]
        return cls(shares, shares.min(axis=0), shares.max(axis=0))
