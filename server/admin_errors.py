"""Refusals of what operators ask of a running engine."""

from __future__ import annotations

from specdec.errors import RequestError


class NotAdministeredError(RequestError):
    """The engine behind this server can not be changed while it runs."""

    reason = "NOT_ADMINISTERED"


class DraftNotSwappedError(RequestError):
    """The draft model could not be changed; the one before is still in place."""

    reason = "DRAFT_NOT_SWAPPED"


class SwapUnderWayError(RequestError):
    """Another draft model is being loaded."""

    reason = "SWAP_UNDER_WAY"

    def __init__(self, message: str = "another draft model is being loaded; retry once it is there") -> None:
        super().__init__(message)
