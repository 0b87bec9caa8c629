"""One of the ways of serving that an experiment compares."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from server.experiment.config.strict_model import StrictModel


class Arm(StrictModel):
    """``request`` holds options of single requests, ``engine`` settings that can switch between blocks; what they may
    name is checked by whoever runs the experiment."""

    weight: float = Field(1.0, gt=0, description="share of the requests, relative to the other arms'")
    request: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)
    url: str | None = Field(None, description="another server, for a comparison of two")
