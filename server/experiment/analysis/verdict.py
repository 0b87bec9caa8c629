"""What an experiment came to."""

from __future__ import annotations

from typing import Literal

from server.experiment.config.strict_model import StrictModel

VerdictKind = Literal["better", "worse", "equivalent", "undecided", "invalid"]


class Verdict(StrictModel):
    """``headline`` is one sentence; ``reasons`` say what it rests on."""

    kind: VerdictKind
    headline: str
    reasons: tuple[str, ...] = ()
