"""Configuration of latency experiments in a running server."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ExperimentsConfig(BaseModel):
    """Experiments that ran when the server ended go on when it is back, whatever ``start`` says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path | None = Field(None, description="where plans and records are kept; null: no experiments here")
    start: tuple[Path, ...] = Field((), description="YAML files of experiments to start once the model is loaded")
    allow_override: bool = Field(
        False, description="callers may choose arms by the header x-specdec-arm, where the experiment allows it too"
    )

    @model_validator(mode="after")
    def _has_a_place(self) -> ExperimentsConfig:
        if self.start and self.folder is None:
            raise ValueError("start needs folder: records have to go somewhere")
        return self
