"""POST /v1/events: what became of a suggestion."""

from __future__ import annotations

import math

from server.auth.caller import current_caller
from server.completion.acceptance import Outcome
from server.http.call import Call

_OUTCOMES = {"view": Outcome.SHOWN, "select": Outcome.ACCEPTED, "dismiss": Outcome.REJECTED}
_INT31 = (1 << 31) - 1


async def log_event(call: Call) -> None:
    """Count it. One of a suggestion that is not remembered says nothing; clients can do nothing about that.

    Raises:
        InvalidRequestError: fields that make no sense, each one named.
    """
    body = call.body()
    kind, completion = body.text("type"), body.text("completion_id")
    select, salt = body.text("select_kind") or call.query.get("select_kind"), body.text("cache_salt") or ""
    shown_ms = body.number("elapsed")
    body.integer("choice_index", 0, _INT31)
    outcome = _OUTCOMES.get(kind or "")
    if outcome is None:
        body.refuse("type", f"must be one of {', '.join(_OUTCOMES)}")
    if not completion:
        body.refuse("completion_id", "must be the id of a completion")
    if shown_ms is not None and not 0 <= shown_ms < math.inf:
        body.refuse("elapsed", "must be a number of milliseconds, not negative")
    body.seen.raise_if_any()
    assert outcome is not None
    assert completion is not None
    if outcome is Outcome.ACCEPTED and select:
        outcome = Outcome.PARTIALLY_ACCEPTED  # of how many characters is not told
    service = call.face.completion
    owner = service.owner(current_caller(), salt)
    service.outcomes.report(owner, completion, outcome, 0, shown_ms or 0.0)
    await call.reply_data(200, b"", b"text/plain; charset=utf-8")
