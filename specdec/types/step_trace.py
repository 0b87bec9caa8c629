"""What one engine step decided about drafting, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DrafterTrace:
    """One drafter's part in a step: sequences it was asked for, nodes it proposed, nodes of its that were verified
    and accepted, the accepted tokens expected of those verified, and milliseconds it took. ``decision`` says why it
    was asked or not: `on`, `off`, `probe`, `forced` (mode ON), `free` (costs next to nothing)."""

    name: str
    decision: str
    sequences: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    predicted: float = 0.0
    ms: float = 0.0


@dataclass(slots=True)
class StepTrace:
    """One step. ``sequences`` sampled a token at least; ``rows`` were computed in all, ``prefill_rows`` of them for
    prompts; ``context`` is the mean number of tokens a row looked back on.

    ``candidates`` draft nodes were proposed, the ``budget`` best verified. Tokens count those of the target itself
    too. ``at_s`` counts from the engine's start. ``control_ms`` is the controller's own time. ``replay`` holds the
    plain values from which `specdec trace replay` reproduces the decision.
    """

    step: int
    at_s: float
    sequences: int
    rows: int
    prefill_rows: int
    context: float
    candidates: int
    budget: int
    predicted_tokens: float
    realised_tokens: int
    predicted_draft_ms: float
    realised_draft_ms: float
    predicted_verify_ms: float
    realised_verify_ms: float
    plan_ms: float
    commit_ms: float
    control_ms: float
    drafters: list[DrafterTrace] = field(default_factory=list)
    replay: dict[str, object] = field(default_factory=dict)

    @property
    def predicted_ms(self) -> float:
        """Milliseconds expected of drafting and verifying."""
        return self.predicted_draft_ms + self.predicted_verify_ms

    @property
    def realised_ms(self) -> float:
        """Milliseconds that drafting and verifying took."""
        return self.realised_draft_ms + self.realised_verify_ms

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this step over its whole time; 0 when no time was measured."""
        whole_ms = self.plan_ms + self.realised_ms + self.commit_ms
        return self.realised_tokens / whole_ms * 1e3 if whole_ms > 0 else 0.0
