"""Why a sequence ended."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. ``ABORTED`` covers client cancel; ``DEADLINE`` a passed deadline."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"
