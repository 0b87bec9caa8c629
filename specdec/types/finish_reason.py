"""Why a sequence ended."""

from __future__ import annotations

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. ``ABORTED`` covers client cancel; ``DEADLINE`` a passed deadline, which is an error, where
    ``TIME_LIMIT`` is an end like any other. ``LINES``, ``INDENT``, ``BLANK_LINE``, ``BRACKET`` and ``SUFFIX`` are the
    text rules of a request."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    LINES = "lines"
    INDENT = "indent"
    BLANK_LINE = "blank_line"
    BRACKET = "bracket"
    SUFFIX = "suffix"
    TIME_LIMIT = "time_limit"
