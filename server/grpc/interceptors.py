"""What every gRPC call passes on its way in: its record, its key, and messages that can not be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from server.auth.access import Access
from server.auth.principal import ANYBODY, Principal, set_caller
from server.grpc.errors import refuse
from server.observe.observer import Observer
from server.observe.records import ARM_HEADER, REQUEST_ID_HEADER, TRACE_HEADERS, call_id, leave_call, set_call
from specdec.errors import FieldViolation, InvalidRequestError, RequestError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

Behaviour = Callable[..., Awaitable[Any]]
OURS = "/specdec.api."
_MAKERS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: Handler) -> Behaviour:
    """What carries a call out."""
    found: Any = {
        (False, False): handler.unary_unary,
        (False, True): handler.unary_stream,
        (True, False): handler.stream_unary,
        (True, True): handler.stream_stream,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return found


def with_behaviour(
    handler: Handler, behaviour: Behaviour, deserializer: Callable[[bytes], Any] | None = None
) -> Handler:
    """``handler`` of the same kind that calls ``behaviour``; ``deserializer`` None: its own."""
    make = _MAKERS[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: Handler = make(behaviour, deserializer or handler.request_deserializer, handler.response_serializer)
    return made


if TYPE_CHECKING:
    Details = grpc.HandlerCallDetails

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
            request_id = call_id(str(metadata.get(REQUEST_ID_HEADER, "")))
            headers = {name: str(metadata[name]) for name in TRACE_HEADERS if name in metadata}
            record = self._observer.begin_call("grpc", endpoint, request_id, headers, many=many)
            record.arm_asked = str(metadata.get(ARM_HEADER, ""))
            context.set_trailing_metadata(((REQUEST_ID_HEADER, request_id),))
            token, status = set_call(record), "UNKNOWN"
            try:
                answer = await behaviour(request, context)
                if record.arm:
                    context.set_trailing_metadata(((REQUEST_ID_HEADER, request_id), (ARM_HEADER, record.arm)))
                status = _status_name(context)
                return answer
            except asyncio.CancelledError:
                status = "CANCELLED"
                raise
            except BaseException:
                status = _status_name(context)
                raise
            finally:
                leave_call(token)
                self._observer.end_call(record, status)

        return call


def _status_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The name of the call's code."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _CODES.get(code or 0, "UNKNOWN")


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """The servicers find who calls with `server.auth.principal.current_caller`. Health and reflection are open to
    anybody where the configuration says so."""

    def __init__(self, access: Access) -> None:
        self._access = access
        services = [health.SERVICE_NAME] if access.open_health else []
        self._open = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
    ) -> Handler | None:
        """The method's own handler, or one that refuses; None for a method that is not served."""
        try:
            set_caller(await self._caller(handler_call_details))
        except RequestError as error:
            return _refusing(error)
        return await continuation(handler_call_details)

    async def _caller(self, details: Details) -> Principal:
        if details.method.startswith(self._open):
            return ANYBODY
        metadata = {name: value for name, value in details.invocation_metadata or () if isinstance(value, str)}
        return await self._access.caller(metadata.get("authorization"), metadata.get("x-api-key"))


def _refusing(error: RequestError) -> Handler:
    """Serves a method of any kind: to be refused, a call's messages need not be read."""

    async def call(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(context, error)

    handler: Handler = grpc.stream_stream_rpc_method_handler(call)
    return handler


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
        return await behaviour(_read_message(requests), context)

    return call


async def _read_message(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Raises InvalidRequestError at the first that could not be read."""
    async for request in requests:
        if isinstance(request, InvalidRequestError):
            raise request
        yield request
