"""The objects an answer consists of."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from server.http.openai.figures import extras
from server.http.totals import Totals
from specdec.types import Finished, FinishReason

_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


@dataclass(frozen=True, slots=True)
class Frame:
    """``model``: by the name that the client asked for."""

    model: str

    def part(self, content: dict[str, Any]) -> dict[str, Any]:
        """One that brings more."""
        return {"model": self.model, "created_at": now(), **content, "done": False}

    def loaded(self, content: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request that asks for nothing: clients send one to have the model loaded."""
        return {"model": self.model, "created_at": now(), **content, "done": True, "done_reason": "load"}

    def end(self, content: dict[str, Any], totals: Totals, end: Finished) -> dict[str, Any]:
        """The last one. Durations are in nanoseconds, and never 0: clients divide by them."""
        spent = end.timings
        return {
            "model": self.model,
            "created_at": now(),
            **content,
            "done": True,
            "done_reason": _REASONS.get(end.reason, "stop"),
            "total_duration": _nanoseconds(spent.queue_ms + spent.prefill_ms + spent.decode_ms),
            "load_duration": _nanoseconds(spent.queue_ms),
            "prompt_eval_count": totals.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(spent.prefill_ms),
            "eval_count": totals.output_tokens,
            "eval_duration": _nanoseconds(spent.decode_ms),
            **extras(totals),
        }


def now() -> str:
    """The time as RFC 3339 has it, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(milliseconds: float) -> int:
    return max(1, round(milliseconds * 1e6))
