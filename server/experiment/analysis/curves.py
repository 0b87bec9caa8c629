"""The curves of a result."""

from __future__ import annotations

from server.experiment.analysis.target_result import Bounds
from server.experiment.config.strict_model import StrictModel


class Curves(StrictModel):
    """Of the primary metric. ``ecdf_a`` and ``ecdf_b`` are its quantiles at (i + 0.5) / n; ``bands`` the half heights
    of their bands. ``differences`` are B - A at the chances ``at``. ``timeline`` holds per stretch of time the seconds
    since the start and the medians of both arms."""

    ecdf_a: tuple[float, ...] = ()
    ecdf_b: tuple[float, ...] = ()
    bands: tuple[float, float] = (1.0, 1.0)
    at: tuple[float, ...] = ()
    differences: tuple[float, ...] = ()
    difference_bounds: tuple[Bounds, ...] = ()
    timeline: tuple[tuple[float, float | None, float | None], ...] = ()
