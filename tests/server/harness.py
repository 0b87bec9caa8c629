"""A whole server on loopback ports, with the fake engine in a real child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status
from grpc_reflection.v1alpha import reflection_pb2

from server.body_budget import MAX_MESSAGE_BYTES
from server.engine_client import EngineClient
from server.engine_supervisor import EngineSupervisor, RestartPolicy
from server.serving import Addresses, Serving
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc, model_pb2_grpc
from specdec.config import Config, EngineConfig, ServerConfig
from tests.fake_engine import ECHO
from tests.server.fake_tokenizer import FakeTokenizer

DETAIL_TYPES = (
    details.BadRequest, details.ErrorInfo, details.QuotaFailure, details.ResourceInfo, details.RetryInfo
)  # fmt: skip


@dataclass
class Harness:
    """A running server, a channel to it, and stubs."""

    serving: Serving
    addresses: Addresses
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.models = model_pb2_grpc.ModelServiceStub(self.channel)


def make_config(*, target: str = "fake", **server: Any) -> Config:
    """Loopback, ports of the system's choice."""
    return Config(
        engine=EngineConfig(target=target), server=ServerConfig(grpc_port=0, **({"http_port": None} | server))
    )


def quick_policy(give_up_after: int = 5, silent_s: float = 30.0) -> RestartPolicy:
    """Restarts without a wait worth the name."""
    return RestartPolicy(first_s=0.01, longest_s=0.02, give_up_after=give_up_after, silent_s=silent_s)


def unread_bytes(client: EngineClient) -> int:
    """Approximate memory of events that no reader has taken yet."""
    return client._table._unread.total


def make_client(config: Config | None = None, *, factory: str = ECHO, **options: Any) -> EngineClient:
    """A client of an engine that was not started; ``options`` are those of `EngineSupervisor`."""
    return EngineClient(
        EngineSupervisor(config or make_config(), factory=factory, **{"policy": quick_policy()} | options)
    )


@asynccontextmanager
async def running_client(
    config: Config | None = None, give_up_after: int = 5, silent_s: float = 30.0
) -> AsyncIterator[EngineClient]:
    """A ready engine client."""
    client = make_client(config, policy=quick_policy(give_up_after, silent_s))
    await client.engine.start()
    try:
        await client.engine.wait_ready()
        yield client
    finally:
        await client.engine.close()


@asynccontextmanager
async def running_server(
    tokenizer: Callable[[], Any] = FakeTokenizer,
    *,
    wait: bool = True,
    silent_s: float = 30.0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    **server: Any,
) -> AsyncIterator[Harness]:
    """A server, ready to serve unless not to ``wait``."""
    policy = quick_policy(silent_s=silent_s)
    serving = Serving(
        make_config(**server), lambda _: tokenizer(), factory=ECHO, policy=policy, max_message_bytes=max_message_bytes
    )
    addresses = await serving.start()
    try:
        if wait:
            await serving.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
            yield Harness(serving, addresses, channel)
        async with asyncio.timeout(5):  # an idle server keeps no events; a reader may be about to take its last one
            while serving.client.in_flight == 0 and unread_bytes(serving.client):
                await asyncio.sleep(0.01)
    finally:
        await serving.stop()


def stream_request(text: str = "hello", *, salt: str = "", request_id: str = "", n: int = 1, **rest: Any) -> Any:
    """A streaming request for the fake engine, whose script is the salt."""
    request = pb.GenerateStreamRequest(text=text, request_id=request_id, **rest)
    request.cache.salt = salt
    request.sampling.n = n
    return request


def rich(error: grpc.aio.AioRpcError) -> dict[type, Any]:
    """The google.rpc details of a failed call, by type; checks that status and trailers agree."""
    trailers = dict(error.trailing_metadata() or ())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    found: dict[type, Any] = {}
    for packed in status.details:
        for kind in DETAIL_TYPES:
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                packed.Unpack(found[kind])
    assert len(found) == len(status.details)
    return found


async def refused(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    """The error a stream ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def failed(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error a unary call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def reflection_of(channel: grpc.aio.Channel, service: str) -> Any:
    """The only method of a reflection service, whose versions share their messages."""
    return channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
