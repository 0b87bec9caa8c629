"""What probes and onlookers read: /livez, /readyz, /version, /trace."""

from __future__ import annotations

from typing import Any

import specdec
from server.http.call import Call
from server.http.endpoint import Endpoint
from server.http.fields.schema import RESPONSES
from server.http.refusal import Refusal
from server.trace_calls import DEFAULT_STEPS, LIMIT_RULE, MAX_STEPS
from specdec.errors import RequestError
from specdec.types.as_json import trace_dict


class ProbeErrors:
    """``{"error": message}``."""

    def body(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that refuses."""
        return {"error": refusal.message}

    def event(self, refusal: Refusal) -> bytes:
        """Nothing: probes stream nothing."""
        return b""


async def live(call: Call) -> None:
    """The server runs, whatever the engine does."""
    state, _ = call.face.state()
    await call.reply(200, {"status": "ok", "engine": state})


async def ready(call: Call) -> None:
    """Whether a request would be taken now."""
    state, is_ready = call.face.state()
    await call.reply(200 if is_ready else 503, {"status": "ready" if is_ready else "not ready", "engine": state})


async def version(call: Call) -> None:
    """Which release this is."""
    await call.reply(200, {"version": specdec.__version__})


async def trace(call: Call) -> None:
    """The engine's last steps, newest last."""
    given = call.query.get("limit", str(DEFAULT_STEPS))
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_STEPS):
        await call.reply(400, {"error": f"limit: {LIMIT_RULE}", "field": "limit"})
        return
    try:
        steps = await call.face.frontend.client.trace(int(given))
    except RequestError as error:
        await call.reply(503, {"error": str(error)})
    else:
        await call.reply(200, [trace_dict(step) for step in steps])


_LIMIT = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_STEPS}}
_ERRORS = ProbeErrors()
PROBES = (
    Endpoint("GET", "/livez", live, _ERRORS, {"summary": "The server runs", "responses": RESPONSES}),
    Endpoint("GET", "/readyz", ready, _ERRORS, {"summary": "Requests are taken", "responses": RESPONSES}),
    Endpoint("GET", "/version", version, _ERRORS, {"summary": "The release", "responses": RESPONSES}),
    Endpoint(
        "GET",
        "/trace",
        trace,
        _ERRORS,
        {"summary": "The controller's last decisions", "parameters": [_LIMIT], "responses": RESPONSES},
    ),
)
