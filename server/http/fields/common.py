"""The fields that every dialect's bodies may carry."""

from __future__ import annotations

from typing import Any

from server.http.body import Body
from server.http.call import Call
from server.http.fields.speculation import read_speculation

_INT32 = (1 << 31) - 1


def read_common(call: Call, body: Body) -> dict[str, Any]:
    """Fields of `Request`: speculation, session (or the header ``x-session-id``), cache salt, priority (a higher one
    goes first), milliseconds per token to keep to. ``call`` learns which other call this one takes the place of."""
    call.supersedes_key = body.text("supersedes_key") or ""
    session = body.text("session")
    return {
        "speculation": read_speculation(body),
        "session": call.header("x-session-id") if session is None else session,
        "cache_salt": body.text("cache_salt") or "",
        "priority": body.integer("priority", -_INT32, _INT32) or 0,
        "target_tpot_ms": body.number("target_tpot_ms"),
    }
