"""Lets operators through, and nobody else."""

from __future__ import annotations

from server.auth.auth_errors import PermissionDeniedError
from server.auth.caller import current_caller


def check_admin(what: str) -> None:
    """Raises PermissionDeniedError unless the caller's key is an operator's. what: what only operators may call."""
    if not current_caller().admin:
        raise PermissionDeniedError(
            f"only a key marked `admin: true` in the server's keys_file may call {what}; make one with "
            "`specdec keys new --admin`"
        )
