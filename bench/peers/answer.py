"""What one engine made of one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FEWEST = 4  # of fewer, the text that is held back for a stop to be told decides the time


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: generated, as the engine counts them. ``first_tokens``: of these, how many there were at ``ttft_ms``,
    the time to the first text; ``e2e_ms``: to the end. ``error``: why there is no answer, "" where there is one."""

    tokens: int = 0
    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    text: str = ""
    first_tokens: int = 1
    error: str = ""

    @property
    def decoded(self) -> int:
        """Tokens after the first; those whose time per token can be told."""
        return 0 if self.error else max(0, self.tokens - self.first_tokens)

    @property
    def decode_ms(self) -> float:
        """What they took."""
        return self.e2e_ms - self.ttft_ms

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; None where there are fewer than `FEWEST`."""
        return self.decode_ms / self.decoded if self.decoded >= FEWEST else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        if self.error:
            return {"error": self.error}
        tpot = self.tpot_ms
        return {
            "tokens": self.tokens, "first_tokens": self.first_tokens, "ttft_ms": round(self.ttft_ms, 3),
            "e2e_ms": round(self.e2e_ms, 3), "tpot_ms": None if tpot is None else round(tpot, 4), "text": self.text,
        }  # fmt: skip
