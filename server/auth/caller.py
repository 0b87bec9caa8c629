"""Who makes the call that runs now: set where a call comes in, read where it is carried out."""

from __future__ import annotations

from contextvars import ContextVar

from server.auth.principal import ANYBODY, Principal

_CALLER: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)


def set_caller(principal: Principal) -> None:
    """For the rest of this task, and of those it starts."""
    _CALLER.set(principal)


def current_caller() -> Principal:
    """The caller; `ANYBODY` where nobody was asked for a key."""
    return _CALLER.get()
