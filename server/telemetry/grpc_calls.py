"""Keeps a record of every gRPC call of specdec's services."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from server.grpc.errors import REQUEST_ID
from server.grpc.method_handlers import OURS, behaviour_of, with_behaviour
from server.telemetry.call_record import ARM
from server.telemetry.current_call import leave_call, set_call
from server.telemetry.observer import TRACE_HEADERS, Observer

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Details = grpc.HandlerCallDetails

MAX_ID_CHARACTERS = 100
_CODES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}


class GrpcCalls(grpc.aio.ServerInterceptor):
    """The first of a server's interceptors, so that what others refuse is recorded too.

    The call's `x-request-id`, or a fresh one, goes back in the trailers: a header would come before the answer, and
    clients do not repeat calls of which they have seen a header.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
    ) -> Handler | None:
        """The method's handler, watched; others' (health, reflection) as they are."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OURS):
            return handler
        metadata: dict[str, Any] = dict(handler_call_details.invocation_metadata or ())
        many = bool(handler.request_streaming and handler.response_streaming)
        watched = self._watched(behaviour_of(handler), method.removeprefix(OURS), metadata, many=many)
        return with_behaviour(handler, watched)

    def _watched(
        self, behaviour: Callable[..., Awaitable[Any]], endpoint: str, metadata: dict[str, Any], *, many: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            request_id = str(metadata.get(REQUEST_ID, ""))[:MAX_ID_CHARACTERS] or uuid.uuid4().hex
            headers = {name: str(metadata[name]) for name in TRACE_HEADERS if name in metadata}
            record = self._observer.begin_call("grpc", endpoint, request_id, headers, many=many)
            record.arm_asked = str(metadata.get(ARM, ""))
            context.set_trailing_metadata(((REQUEST_ID, request_id),))
            token, status = set_call(record), "UNKNOWN"
            try:
                answer = await behaviour(request, context)
                if record.arm:
                    context.set_trailing_metadata(((REQUEST_ID, request_id), (ARM, record.arm)))
                status = _status(context)
                return answer
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            except BaseException:
                status = _status(context)
                raise
            finally:
                leave_call(token)
                self._observer.end_call(record, status)

        return call


def _status(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The name of the call's code."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code or 0, "UNKNOWN")
