"""Why a sample ended, in OpenAI's words."""

from __future__ import annotations

from typing import Any

from specdec.types import Finished, FinishReason

_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}


def finish_fields(event: Finished, called_tools: bool = False) -> dict[str, Any]:
    """``finish_reason`` (``abort``, as vLLM says it, where somebody ended the request by its id), and vLLM's
    ``stop_reason``: the stop string or the token id of the caller's that ended the sample."""
    reason = _REASONS.get(event.reason, "stop")
    own_end = event.reason == FinishReason.EOS
    return {
        "finish_reason": "tool_calls" if called_tools and reason == "stop" else reason,
        "stop_reason": None if own_end else event.matched_stop,
    }
