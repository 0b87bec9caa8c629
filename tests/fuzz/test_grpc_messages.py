"""Any bytes sent to a gRPC method get an answer or an error, and leave no state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor

from server.grpc.server import SERVICES
from tests.fuzz.fuzzed_server import FEW, FuzzedServer, fuzzed_server
from tests.fuzz.livez_watch import livez_watch
from tests.fuzz.message_fuzzer import MessageFuzzer

_LIMIT_S = 120.0
# Status that the client makes up when the server ends a call to which it is still writing.
_OUR_OWN = "Internal error from Core"
_BROKEN = (
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
)  # fmt: skip


def methods() -> list[MethodDescriptor]:
    """All of ours."""
    services = [descriptor_pool.Default().FindServiceByName(name) for name in SERVICES]
    return [method for service in services for method in service.methods]


async def throw_messages(fuzzed: FuzzedServer, count: int, seed: int) -> None:
    """``count`` messages at each method."""
    async with grpc.aio.insecure_channel(fuzzed.server.grpc_address) as channel:
        for method in methods():

            async def one(number: int, method: MethodDescriptor = method) -> str | None:
                random = Random(f"{seed}/{method.full_name}/{number}")
                fuzzer = MessageFuzzer(random)
                sent = [fuzzer.wire(method.input_type) for _ in range(_messages(method, random))]
                try:
                    await _call(channel, method, sent)
                except grpc.aio.AioRpcError as error:
                    if error.code() in _BROKEN and error.details() != _OUR_OWN:
                        status = f"{error.code().name}: {(error.details() or '')[:300]}"
                        return f"{method.full_name} (seed {seed}, number {number}): {status}; sent {sent!r:.600}"
                return None

            await fuzzed.throw(count, one)


def _messages(method: MethodDescriptor, random: Random) -> int:
    return random.randrange(1, 6) if method.client_streaming else 1


async def _call(channel: grpc.aio.Channel, method: MethodDescriptor, sent: list[bytes]) -> None:
    """Make the call with the bytes unchanged, and read every response."""
    path = f"/{method.containing_service.full_name}/{method.name}"

    async def messages() -> AsyncIterator[bytes]:
        for data in sent:
            yield data

    call: Any
    if method.client_streaming:
        call = channel.stream_stream(path)(messages(), timeout=_LIMIT_S)
    elif method.server_streaming:
        call = channel.unary_stream(path)(sent[0], timeout=_LIMIT_S)
    else:
        await channel.unary_unary(path)(sent[0], timeout=_LIMIT_S)
        return
    async for _ in call:
        pass


async def test_some_messages_at_every_method() -> None:
    async with fuzzed_server() as fuzzed:
        await throw_messages(fuzzed, FEW, 0)
        await fuzzed.unharmed()


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_many_messages_at_every_method(many: int, seed: int) -> None:
    async with fuzzed_server() as fuzzed:
        with livez_watch(fuzzed.server.http_port):
            await throw_messages(fuzzed, many, seed)
        await fuzzed.unharmed()
