"""Handlers of gRPC methods, taken apart and put together again around something."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

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
