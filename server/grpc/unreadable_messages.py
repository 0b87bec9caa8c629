"""Refuses messages that can not be read, which gRPC itself would report as a fault of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from server.grpc.errors import refuse
from server.grpc.method_handlers import OURS, Behaviour, behaviour_of, with_behaviour
from specdec.errors import FieldViolation, InvalidRequestError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Details = grpc.HandlerCallDetails


class UnreadableMessages(grpc.aio.ServerInterceptor):
    """The last of a server's interceptors: such a call is recorded, and its key was asked for."""

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
    ) -> Handler | None:
        """The handler of a method of ours, which is given only what could be read; others' as they are."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OURS):
            return handler
        behaviour = behaviour_of(handler)
        checked = _many(behaviour) if handler.request_streaming else _one(behaviour)
        deserializer = handler.request_deserializer
        return with_behaviour(handler, checked, _forgiving(deserializer) if deserializer else None)


def _forgiving(deserializer: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except DecodeError:
            # Raised here, it would end the call before anything of ours could.
            return InvalidRequestError(
                [FieldViolation("message", "is no message of this method; build it from the .proto files served")]
            )

    return read


def _one(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, InvalidRequestError):
            await refuse(context, request)
        return await behaviour(request, context)

    return call


def _many(behaviour: Behaviour) -> Behaviour:
    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await behaviour(_read(requests), context)

    return call


async def _read(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Raises InvalidRequestError at the first that could not be read."""
    async for request in requests:
        if isinstance(request, InvalidRequestError):
            raise request
        yield request
