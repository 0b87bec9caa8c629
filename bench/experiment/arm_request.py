"""What an arm may ask of every request."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field

from bench.experiment.arm_speculation import ArmSpeculation
from bench.serve.ask import Ask
from server.experiment.config.strict_model import StrictModel
from specdec.client.generate_options import GenerateOptions


class ArmRequest(StrictModel):
    """``prediction`` and ``session`` False: those that the prompts have are not sent. ``body``: further fields for
    servers with OpenAI's API; gRPC has none."""

    speculation: ArmSpeculation = ArmSpeculation()
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    target_tpot_ms: float | None = Field(None, gt=0)
    prediction: bool = True
    session: bool = True
    body: dict[str, Any] = Field(default_factory=dict)

    @property
    def options(self) -> GenerateOptions:
        """For gRPC."""
        return GenerateOptions(
            speculation=self.speculation.params, priority=self.priority, target_tpot_ms=self.target_tpot_ms
        )

    @property
    def fields(self) -> dict[str, Any]:
        """For HTTP: what was written in the plan and nothing else, as other servers refuse fields of ours."""
        names = ("speculation", "priority", "target_tpot_ms")
        written = self.model_dump(mode="json", exclude_unset=True, include=set(names))
        return written | self.body

    def apply(self, ask: Ask) -> Ask:
        """The prompt as this arm sends it."""
        hidden: dict[str, Any] = {name: "" for name in ("prediction", "session") if not getattr(self, name)}
        return dataclasses.replace(ask, **hidden)
