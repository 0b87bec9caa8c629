"""Runs an endpoint for one call: asks for the key, reads the body, words what goes wrong, stops with the client."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from server.auth.caller import set_caller
from server.auth.http_auth import KEY_HEADERS, http_caller
from server.http.call import Call
from server.http.endpoint import Endpoint
from server.http.face import Face
from server.http.http_errors import ClientGoneError
from server.http.refusal import refusal_of


class EndpointApp:
    """An ASGI application for the ``endpoints`` that share a method and path."""

    def __init__(self, endpoints: Sequence[Endpoint], face: Face) -> None:
        self._endpoints, self._face = endpoints, face

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, endpoint = Call(scope, receive, send, self._face), self._endpoints[-1]
        try:
            sent = {name: call.header(name) for name in KEY_HEADERS}
            set_caller(await http_caller(self._face.frontend.access, endpoint.path, sent))
            await call.read()
            endpoint = self._choose(call)
            await _unless_gone(call, endpoint.answer(call))
        except ClientGoneError:
            return  # the answer went nowhere; leaving ended the request in the engine
        except Exception as error:
            refusal = refusal_of(error, call.field_names)
            if call.began:
                await call.finish(endpoint.errors.event(refusal))
            else:
                await call.reply(refusal.status, endpoint.errors.body(refusal), refusal.headers)

    def _choose(self, call: Call) -> Endpoint:
        if len(self._endpoints) > 1:
            for endpoint in self._endpoints:
                if endpoint.claims is not None and endpoint.claims(call.data):
                    return endpoint
        return self._endpoints[-1]


async def _unless_gone(call: Call, work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``, and cancel it at once when the client leaves.

    Raises:
        ClientGoneError: it did.
        Exception: what ``work`` raises.
    """
    # The work is done in the task that is there already: one of its own costs every answer a turn of the event loop.
    task = asyncio.current_task()
    assert task is not None  # every call runs in one
    working, left = True, False

    def leave(_: asyncio.Task[None]) -> None:
        nonlocal left
        if working:
            left = task.cancel()

    leaving = asyncio.create_task(call.gone())
    leaving.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        working = False
        leaving.cancel()
