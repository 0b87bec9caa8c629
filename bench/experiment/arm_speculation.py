"""How an arm's requests may be drafted for."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from server.experiment.config.strict_model import StrictModel
from specdec.types import SpeculationMode, SpeculationParams


class ArmSpeculation(StrictModel):
    """As `SpeculationParams`; written as a mapping, or as its mode alone."""

    mode: SpeculationMode = SpeculationMode.AUTO
    drafters: tuple[str, ...] | None = Field(None, min_length=1)
    max_nodes: int | None = Field(None, ge=0, le=63)
    max_depth: int | None = Field(None, ge=0, le=63)
    width: int | None = Field(None, ge=1, le=16)

    @model_validator(mode="before")
    @classmethod
    def _from_mode(cls, value: Any) -> Any:
        # YAML reads a bare off as false, and on as true.
        if isinstance(value, bool):
            return {"mode": "on" if value else "off"}
        return {"mode": value} if isinstance(value, str) else value

    @property
    def params(self) -> SpeculationParams:
        """As the client has it."""
        return SpeculationParams(self.mode, self.drafters, self.max_nodes, self.max_depth, self.width)
