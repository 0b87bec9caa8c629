"""When an experiment ends, and how sure it must be."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from server.experiment.config.strict_model import Seconds, StrictModel


class Stopping(StrictModel):
    """``fixed``: conclude once, when the planned number is reached. ``always_valid``: conclude at any time; the
    intervals are wider."""

    rule: Literal["fixed", "always_valid"] = "fixed"
    alpha: float = Field(0.05, gt=0, le=0.5)
    max_requests: int | None = Field(None, ge=1)
    max_duration: Seconds | None = Field(None, gt=0)
    min_units: int = Field(8, ge=8, description="pairs, blocks or keys before anything is concluded")
    expected_units: int = Field(1000, ge=1, description="always_valid is tightest about here")
    max_slip_ms: float = Field(5.0, gt=0, description="the load generator's p99 lag above which a run is invalid")
