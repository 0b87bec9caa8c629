"""Streams whose headers wait for the first token, where that is asked for.

A router can send a call elsewhere as long as nothing of an answer has come. A stream usually begins with the engine's
first word, before the prompt is read; held back, it begins with a token, and what fails before that is an error of its
own.
"""

from __future__ import annotations

from specdec.core.types import RequestEvent, Started
from specdec.errors import FieldViolation, InvalidRequestError

HOLD_HEADER = "x-specdec-hold-headers"
_VALUES = {"1": True, "0": False}


def holds(asked: str, default: bool) -> bool:
    """Whether a call's headers wait: as its own header asks, else (empty: it has none) as the server is set.

    Raises:
        InvalidRequestError: the header is neither 1 nor 0.
    """
    found = _VALUES.get(asked, default if not asked else None)
    if found is None:
        raise InvalidRequestError(
            [FieldViolation(HOLD_HEADER, "must be 1, headers wait for the first token, or 0, they do not")]
        )
    return found


def precedes_tokens(event: RequestEvent) -> bool:
    """Whether ``event`` is one that a held stream does not begin with."""
    return isinstance(event, Started)
