"""Where a figure goes with time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

LEAST = 6


def slope(times: Seq[float], values: Seq[float]) -> float | None:
    """Theil-Sen: the median of the slopes of all pairs, per unit of time, which a few odd values do not move (Sen 1968,
    doi 10.1080/01621459.1968.10480934). None for fewer than `LEAST` values."""
    if len(times) < LEAST:
        return None
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(t), 1)
    return float(np.median((v[j] - v[i]) / (t[j] - t[i])))
