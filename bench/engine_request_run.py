"""How one request went in one arm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.types import FinishReason, SpeculationStats, Usage

MIN_TIMED_TOKENS = 4  # fewer are one step or two: their ratio says nothing


@dataclass(slots=True)
class RequestRun:
    """``decode_s``: seconds spent in `Engine.step` after the step that brought the first token, to the last one.
    ``first_tokens``: how many came with that step, as its tree may have been accepted already."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    decode_s: float = 0.0
    first_tokens: int = 0
    reason: FinishReason = FinishReason.ABORTED
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    usage: Usage = field(default_factory=Usage)

    @property
    def gaps(self) -> int:
        """Tokens after the first: what ``decode_s`` was spent on."""
        return max(0, len(self.tokens) - 1)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None when there are too few tokens, or all came in the first
        step, which prefills too."""
        if len(self.tokens) < MIN_TIMED_TOKENS or self.decode_s <= 0:
            return None
        return self.decode_s / self.gaps * 1e3

    def as_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "tokens": len(self.tokens),
            "first_tokens": self.first_tokens,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "decode_ms": round(self.decode_s * 1e3, 3),
            "ms_per_token": None if self.tpot_ms is None else round(self.tpot_ms, 3),
            "steps": self.stats.num_steps,
            "spec_steps": self.stats.num_spec_steps,
            "draft_tokens": self.stats.num_draft_tokens,
            "accepted_draft_tokens": self.stats.num_accepted_draft_tokens,
            "by_drafter": {
                name: [part.num_draft_tokens, part.num_accepted_draft_tokens]
                for name, part in sorted(self.stats.by_drafter.items())
            },
            "reason": str(self.reason),
        }
