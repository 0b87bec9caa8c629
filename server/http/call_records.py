"""Keeps a record of every HTTP call."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.observe.observer import Observer
from server.observe.records import (
    ARM_HEADER,
    MAX_ID_CHARACTERS,
    REQUEST_ID_HEADER,
    leave_call,
    set_call,
)

_REQUEST_ID = REQUEST_ID_HEADER.encode()
_ARM = ARM_HEADER.encode()
# A proxy's status for a client that has left; no client sees it.
_CLIENT_LEFT = "499"
UNKNOWN_ENDPOINT = "other"


class HttpCalls:
    """An ASGI application around ``app``. Every answer carries an ``x-request-id``: the client's, or a fresh one."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app, self._observer = app, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = self._observer.begin_call(
            "http", scope["path"], lambda name: headers.get(name.encode(), b"").decode("latin-1")
        )
        given = headers.get(_REQUEST_ID, b"")
        if not given:
            given = record.request_id.encode()
            # The call has one id everywhere, so the fresh id replaces the missing header.
            scope["headers"] = [*scope["headers"], (_REQUEST_ID, given)]
        status = ""

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                _add_request_id(message, given)
                if record.arm:
                    message["headers"] = [*message["headers"], (_ARM, record.arm.encode())]
            await send(message)

        token = set_call(record)
        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            status = _CLIENT_LEFT
            raise
        except Exception:
            status = "500"
            raise
        finally:
            leave_call(token)
            record.endpoint = _endpoint(scope)
            self._observer.end_call(record, status or _CLIENT_LEFT)


def _add_request_id(message: Message, request_id: bytes) -> None:
    """Add the call's id to the headers of its answer, unless it is too long."""
    if len(request_id) <= MAX_ID_CHARACTERS:
        message["headers"] = [*message.get("headers", ()), (_REQUEST_ID, request_id)]


def _endpoint(scope: Scope) -> str:
    """The path with placeholders for its parameters; one name for all that is not served, as there is no end of it."""
    path: str = getattr(scope.get("endpoint"), "path", UNKNOWN_ENDPOINT)
    return path
