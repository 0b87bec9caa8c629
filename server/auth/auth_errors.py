"""Refusals of callers: unknown, not allowed, or too many at once to look at."""

from __future__ import annotations

from specdec.errors import RequestError


class UnauthenticatedError(RequestError):
    """The call carries no key, or one that is not known here."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(RequestError):
    """The caller is known, and may not do this."""

    reason = "PERMISSION_DENIED"


class KeyChecksBusyError(RequestError):
    """Too many keys wait to be checked against slow hashes."""

    reason = "KEY_CHECKS_BUSY"

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"too many keys are being checked; retry in {retry_after_s:.1f} s")
