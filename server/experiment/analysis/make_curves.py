"""The curves of a result."""

from __future__ import annotations

import numpy as np

from server.experiment.analysis.curves import Curves
from server.experiment.analysis.selection import Selection
from server.experiment.analysis.targets import bounds
from server.experiment.metrics import METRICS
from server.experiment.stats.distribution_band import band_half_width
from server.experiment.stats.order_statistics import quantile
from server.experiment.stats.quantile_comparison import QuantileComparison
from server.experiment.stats.two_arm_sample import TwoArmSample

CURVE_CHANCES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_POINTS = 200
_STRETCHES = 48


def make_curves(
    selection: Selection, metric: str, sample: TwoArmSample, compared: list[QuantileComparison], alpha: float
) -> Curves:
    """``compared`` are the quantiles at `CURVE_CHANCES`; those that the data do not bound are left out."""
    if not all(sample.sizes):
        return Curves()
    drawn = [(c, bounds(c.difference(alpha))) for c in compared]
    drawn = [(c, b) for c, b in drawn if None not in b]
    ecdf_a, ecdf_b = (_quantiles(values) for values in sample.values)
    units_a, units_b = (int(np.count_nonzero(units)) for units in sample.present())
    return Curves(
        ecdf_a=ecdf_a,
        ecdf_b=ecdf_b,
        bands=(band_half_width(units_a, alpha), band_half_width(units_b, alpha)),
        at=tuple(c.p for c, _ in drawn),
        differences=tuple(c.b - c.a for c, _ in drawn),
        difference_bounds=tuple(b for _, b in drawn),
        timeline=_timeline(selection, metric),
    )


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    n = min(_POINTS, len(values))
    ordered = np.sort(values)
    return tuple(quantile(ordered, (i + 0.5) / n) for i in range(n))


def _timeline(selection: Selection, metric: str) -> tuple[tuple[float, float | None, float | None], ...]:
    """Medians of both arms per stretch of time: seconds since the start, control, treatment."""
    value = METRICS[metric].value
    rows = [
        (record.arrival, arm, value(record))
        for arm, records in enumerate(selection.records)
        for record in records
        if record.ok and np.isfinite(value(record))
    ]
    if not rows:
        return ()
    begin, end = min(rows)[0], max(rows)[0]
    width = max((end - begin) / _STRETCHES, 1e-9)
    stretches: dict[int, tuple[list[float], list[float]]] = {}
    for at, arm, found in rows:
        stretches.setdefault(min(_STRETCHES - 1, int((at - begin) / width)), ([], []))[arm].append(found)
    points = []
    for stretch, arms in sorted(stretches.items()):
        a, b = (float(np.median(arm)) if arm else None for arm in arms)
        points.append(((stretch + 0.5) * width, a, b))
    return tuple(points)
