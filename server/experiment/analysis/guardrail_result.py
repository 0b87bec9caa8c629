"""How one guardrail fared."""

from __future__ import annotations

from typing import Literal

from server.experiment.analysis.target_result import Bounds
from server.experiment.config.strict_model import StrictModel


class GuardrailResult(StrictModel):
    """``held``: an increase beyond the limit is ruled out; ``broken``: it is shown; ``open``: neither."""

    label: str
    state: Literal["held", "open", "broken"]
    limit: float
    increase: float | None
    bounds: Bounds
    text: str
