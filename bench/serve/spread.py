"""Mean and quantiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

QUANTILES = (50, 90, 95, 99)


def spread(values: Seq[float]) -> dict[str, float | int]:
    """``n``, and where there are values ``mean``, ``p50`` to ``p99`` and ``max``.

    A quantile is a value that was measured: the smallest that at least that share of all do not exceed.
    """
    if not values:
        return {"n": 0}
    points = np.percentile(values, QUANTILES, method="inverted_cdf")
    found: dict[str, float | int] = {"n": len(values), "mean": round(float(np.mean(values)), 4)}
    found |= {f"p{q}": round(float(point), 4) for q, point in zip(QUANTILES, points, strict=True)}
    return found | {"max": round(float(max(values)), 4)}
