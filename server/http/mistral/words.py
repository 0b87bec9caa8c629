"""Mistral's words."""

from __future__ import annotations

from specdec.types import Finished, FinishReason

_REASONS = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "error"}


def finish_reason(event: Finished) -> str:
    """Why a sample ended."""
    return _REASONS.get(event.reason, "stop")
