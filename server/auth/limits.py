"""What one key may use."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """None: no limit. Tokens are those of prompts and of outputs; a call that begins within the limit may end beyond
    it, and the next ones wait for the difference. A request above ``max_priority`` runs at that priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_concurrent: int | None = Field(None, ge=1)
    max_priority: int | None = None
