"""What was seen of one request, and the times that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Outcome = Literal["ok", "refused", "failed", "cut"]


@dataclass(slots=True)
class Record:
    """All ``_s`` are seconds of the event loop's clock. ``due_s``: when it should have been sent; where each request
    waits for the one before, that is when it was. ``chunk_s``: when each message that had text in it came;
    ``chunk_tokens``: the tokens of each, empty where the server does not tell; neither does every one tell ``accepted``
    (entry k counts the verify steps that accepted k draft tokens), ``queue_ms`` and the tokens of ``token_hash``.

    Outcomes: "refused" for now by the server, "failed" in another way, "cut" by our own timeout.
    """

    name: str
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    tokens_per_step: float | None = None
    accepted: tuple[int, ...] = ()
    queue_ms: float | None = None
    token_hash: bytes = b""
    text_hash: bytes = b""
    outcome: Outcome = "ok"
    error: str = ""
    retry_after_s: float | None = None

    def chunk(self, now_s: float, tokens: int | None = None) -> None:
        """A message with text came."""
        self.chunk_s.append(now_s)
        if tokens is not None:
            self.chunk_tokens.append(tokens)

    def steps(self, number: int, drafted: int, histogram: Sequence[int]) -> None:
        """There were ``number`` verify steps, ``drafted`` of them with drafts, counted by accepted tokens."""
        if number:
            self.tokens_per_step = self.output_tokens / number
        counts = [*histogram] or [0]
        counts[0] += number - drafted
        self.accepted = tuple(counts) if number else ()

    @property
    def ok(self) -> bool:
        """Whether it was answered to the end."""
        return self.outcome == "ok"

    @property
    def slip_ms(self) -> float:
        """How much later than due it was sent."""
        return (self.sent_s - self.due_s) * 1e3

    @property
    def ttft_ms(self) -> float:
        """From when it was due to the first text, or to the end of an answer without any."""
        first = self.chunk_s[0] if self.chunk_s else self.end_s
        return (first - self.due_s) * 1e3

    @property
    def e2e_ms(self) -> float:
        """From when it was due to the end."""
        return (self.end_s - self.due_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1)

    @property
    def gaps_ms(self) -> list[float]:
        """Times between neighbouring messages with text."""
        return [(b - a) * 1e3 for a, b in pairwise(self.chunk_s)]

    def as_dict(self, start_s: float) -> dict[str, Any]:
        """JSON-able; times in ms, ``due_ms`` from the beginning of the run."""
        found: dict[str, Any] = {
            "name": self.name, "outcome": self.outcome, "due_ms": round((self.due_s - start_s) * 1e3, 3),
            "slip_ms": round(self.slip_ms, 3), "e2e_ms": round(self.e2e_ms, 3), "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "output_tokens": self.output_tokens, "chunks": len(self.chunk_s),
        }  # fmt: skip
        if self.ok:
            tpot = self.tpot_ms
            found |= {"ttft_ms": round(self.ttft_ms, 3), "tpot_ms": None if tpot is None else round(tpot, 4)}
        else:
            found |= {"error": self.error, "retry_after_s": self.retry_after_s}
        return found
