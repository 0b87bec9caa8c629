"""The call that runs now: set where it comes in, found by whatever is done for it."""

from __future__ import annotations

from contextvars import ContextVar, Token

from server.telemetry.call_record import CallRecord
from specdec.errors import RequestError

_CALL: ContextVar[CallRecord | None] = ContextVar("call", default=None)


def set_call(call: CallRecord) -> Token[CallRecord | None]:
    """For the rest of this task, and of those it starts; `leave_call` takes it back."""
    return _CALL.set(call)


def leave_call(token: Token[CallRecord | None]) -> None:
    """No call from now on, or the one before."""
    _CALL.reset(token)


def current_call() -> CallRecord | None:
    """The call; None outside of any."""
    return _CALL.get()


def note_refusal(error: Exception) -> None:
    """The call that runs now is refused, or breaks off, with ``error``."""
    call = _CALL.get()
    if call is not None:
        call.reason = error.reason if isinstance(error, RequestError) else "INTERNAL"


def current_arm() -> str:
    """The arms of experiments that the call got, as `CallRecord` has them; empty for none."""
    call = _CALL.get()
    return "" if call is None else call.arm
