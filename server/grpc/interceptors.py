"""Every gRPC call's record, key and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from server.auth.access import Access
from server.auth.principal import check_admin, set_caller
from server.body_budget import BodyBudget, MessageReads
from server.grpc.errors import Context, refuse
from server.grpc.wire_limits import check_wire
from server.observe.observer import Observer
from server.observe.records import ARM_HEADER, REQUEST_ID_HEADER
from specdec.api.v1 import admin_pb2, completion_pb2, experiment_pb2, generation_pb2, model_pb2
from specdec.errors import InvalidRequestError, RequestError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Details = grpc.HandlerCallDetails

Behaviour = Callable[..., Awaitable[Any]]
Read = Callable[[bytes], Any]
OURS = "/specdec.api."
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (generation_pb2, completion_pb2, model_pb2, admin_pb2, experiment_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Methods of specdec by their paths."""
_OPEN = f"/{health.SERVICE_NAME}/"  # the methods that need no key
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name
_LIMITED = METHODS | {f"{_OPEN}{name}": _HEALTH[name] for name in ("Check", "Watch")}
"""Methods whose messages are read within the limits; those of health checks come without a key."""
_OPERATORS = frozenset(f"{OURS}v1.{name}" for name in ("AdminService", "ExperimentService"))
_INLINE_BYTES = 1 << 15  # a message up to this size is unpacked on the event loop, in 5 ms at most
_LARGE_BYTES = 1 << 20  # larger ones are unpacked one at a time: each takes the interpreter for some 10 ms


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Records every call, sets its caller, and reads its messages within the limits.

    Methods are served as streams of bytes, which look the same on the wire. So a message takes room when its size is
    known, its lists are counted before they are unpacked, a large message is unpacked outside the event loop, and what
    is wrong with it or with the call becomes a status with a reason. No message of a caller without access is read.

    Returns the call's `x-request-id`, or a new one, in the trailers: clients do not repeat a call after its headers.
    """

    def __init__(self, access: Access, observer: Observer, budget: BodyBudget) -> None:
        self._access, self._observer, self._budget = access, observer, budget
        self._large, self._reads = asyncio.Lock(), MessageReads(2 * budget.limit // budget.longest)

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
    ) -> Handler | None:
        path, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        handler = await continuation(handler_call_details)
        try:
            await self._set_caller(path, metadata)
        except RequestError as error:
            handler, answer = _REFUSING, partial(_refused, error)
        else:
            method = _LIMITED.get(path)
            if handler is None or method is None:  # such as reflection
                return None if path.startswith(_OPEN) else handler  # gRPC has no answer to Health.List
            deserializer: Any = handler.request_deserializer
            behaviour: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
            read = partial(_read, deserializer, method.input_type)
            serve = self._serve_stream if method.client_streaming else self._serve
            answer = partial(_answered, partial(serve, behaviour, read))
        if path in METHODS:
            # Other texts count as absent, since no trailer could hold such an id of the call.
            texts = {k: v for k, v in metadata or () if isinstance(v, str) and v.isascii() and v.isprintable()}
            answer = partial(self._recorded, answer, path, texts)
        streams, unary = grpc.stream_stream_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        make: Any = streams if handler.response_streaming else unary
        made: Handler = make(answer, None, handler.response_serializer)
        return made

    async def _set_caller(self, path: str, metadata: Any) -> None:
        """Set the caller (`server.auth.principal.current_caller`) by the call's key, of which health checks need none.

        Raises:
            UnauthenticatedError: the key is missing or unknown.
            PermissionDeniedError: only operators may make the call.
        """
        if path.startswith(_OPEN):
            return
        set_caller(await self._access.grpc_caller(metadata))
        service = path.rpartition("/")[0]
        if service in _OPERATORS:
            check_admin(service.rpartition(".")[2])

    async def _recorded(
        self, behaviour: Behaviour, path: str, metadata: dict[str, str], request: Any, context: Context
    ) -> Any:
        endpoint, many = path.removeprefix(OURS), METHODS[path].client_streaming
        with self._observer.call("grpc", endpoint, lambda name: metadata.get(name, ""), many=many) as record:
            request_id = REQUEST_ID_HEADER, record.request_id
            context.set_trailing_metadata((request_id,))
            try:
                answer = await behaviour(request, context)
                if record.arm:
                    context.set_trailing_metadata((request_id, (ARM_HEADER, record.arm)))
                return answer
            except asyncio.CancelledError:
                record.status = "CANCELLED"
                raise
            finally:
                code: Any = context.code()  # None: the call was answered
                record.status = record.status or ("OK" if code is None else code.name)

    async def _serve(self, behaviour: Behaviour, read: Read, _: AsyncIterator[bytes], context: Context) -> Any:
        """Serve a call of one message. gRPC's iterator would keep a message that is not the last."""
        with self._budget.body() as body:
            async with self._reads.place():
                data = await context.read()
                if data is grpc.aio.EOF:
                    raise InvalidRequestError.of("message", "is missing")
                await body.reserve(len(data))
            request = await self._unpack(read, data)
            del data
            return await behaviour(request, context)

    async def _serve_stream(self, behaviour: Behaviour, read: Read, _: AsyncIterator[bytes], context: Context) -> Any:
        """Serve a client's stream. A message takes room only while it is unpacked, since it may arrive at any time."""

        async def unpacked() -> AsyncIterator[Any]:
            while (data := await context.read()) is not grpc.aio.EOF:
                with self._budget.body() as body:
                    await body.reserve(len(data))
                    request = await self._unpack(read, data)
                del data
                yield request

        return await behaviour(unpacked(), context)

    async def _unpack(self, read: Read, data: bytes) -> Any:
        if len(data) <= _INLINE_BYTES:
            return read(data)
        async with self._large if len(data) > _LARGE_BYTES else nullcontext():
            return await asyncio.to_thread(read, data)


async def _refused(error: RequestError, _: AsyncIterator[bytes], context: Context) -> None:
    await refuse(context, error)


_REFUSING: Handler = grpc.stream_stream_rpc_method_handler(_refused)


async def _answered(behaviour: Behaviour, messages: AsyncIterator[bytes], context: Context) -> Any:
    """Call ``behaviour``; what it raises becomes the status of the call."""
    try:
        return await behaviour(messages, context)
    except grpc.aio.AbortError as error:  # a health check ends itself
        error.__traceback__ = error.__context__ = None  # as in `refuse`
        raise
    except Exception as error:
        failed = error
    await refuse(context, failed)


def _read(deserializer: Callable[[bytes], Any], descriptor: Descriptor, data: bytes) -> Any:
    """Return the message.

    Raises:
        InvalidRequestError: it is none of the method's, or exceeds `check_wire`.
    """
    check_wire(data, descriptor)
    try:
        return deserializer(data)
    except DecodeError:
        problem = "is no message of this method; build it from the .proto files served"
        raise InvalidRequestError.of("message", problem) from None
