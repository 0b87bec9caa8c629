"""A server that is too busy, as it says."""

from __future__ import annotations

from specdec.errors import SpecdecError


class RefusedError(SpecdecError):
    """``retry_after_s``: when it is worth another try, None where the server gave no hint."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)
