"""One compared number of a result."""

from __future__ import annotations

from server.experiment.config.strict_model import StrictModel

Bounds = tuple[float | None, float | None]
"""An interval as JSON has it: None where it is not bounded."""


class TargetResult(StrictModel):
    """``a`` is the control's. Intervals have the plan's level, one each; None where there were no values."""

    label: str
    title: str
    unit: str
    lower_is_better: bool
    sizes: tuple[int, int]
    a: float | None
    b: float | None
    a_bounds: Bounds
    b_bounds: Bounds
    ratio: float | None
    ratio_bounds: Bounds
    difference: float | None
    difference_bounds: Bounds
    p_value: float
    p_adjusted: float | None = None  # Holm's, among the secondary metrics
    units: int = 0
    merged: int = 1  # consecutive units that were taken as one, because they depend on each other
    variance_left: float | None = None  # by CUPED; None: not applied
