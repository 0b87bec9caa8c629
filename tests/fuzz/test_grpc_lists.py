"""Every repeated field of every gRPC method, filled up to its limit and up to the longest message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from statistics import median
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from server.body_budget import MAX_MESSAGE_BYTES
from server.engine_client import MAX_TRACE_STEPS
from server.grpc.interceptors import METHODS
from specdec.api.v1 import completion_pb2, generation_pb2, model_pb2
from specdec.core.types import trace_step
from tests.fuzz.fuzzed_server import FuzzedServer, assert_returned, fuzzed_server, settled_bytes
from tests.fuzz.livez_watch import livez_watch
from tests.server.long_lists import limit_of, repeated_fields, with_items

_AT_ONCE, _REPEATS = 2, 3
_TOKEN = 7
_LONGEST_BYTES = MAX_MESSAGE_BYTES
_KINDS = {
    generation_pb2.GenerateRequest.DESCRIPTOR: generation_pb2.GenerateRequest(
        text="a b", sampling={"n": 8, "seed": 1}, stopping={"max_tokens": 8}
    ),
    generation_pb2.GenerateStreamRequest.DESCRIPTOR: generation_pb2.GenerateStreamRequest(
        text="a b", sampling={"n": 8, "seed": 1}, stopping={"max_tokens": 8}
    ),
    completion_pb2.CompleteRequest.DESCRIPTOR: completion_pb2.CompleteRequest(
        fim={"prefix": "a"}, completion={"mode": "MODE_PREFIX"}, stopping={"max_tokens": 8}
    ),
    completion_pb2.CompleteSessionRequest.DESCRIPTOR: completion_pb2.CompleteSessionRequest(
        setup={"completion": {"mode": "MODE_PREFIX"}}
    ),
}


def long_messages(method: MethodDescriptor) -> list[tuple[str, bytes]]:
    """Messages with each repeated field at its limit and nearly as long as a message may be, under the field's name."""
    found = []
    for path in repeated_fields(method.input_type):
        one = with_items(method.input_type, path, 1, _TOKEN).ByteSize()
        item = max(1, with_items(method.input_type, path, 1001, _TOKEN).ByteSize() - one) / 1000
        for count in (limit_of(path), int(0.8 * _LONGEST_BYTES / item)):
            message = type(with_items(method.input_type, path, 0))()
            if (base := _KINDS.get(method.input_type)) is not None:
                message.CopyFrom(base)
            data = with_items(method.input_type, path, count, _TOKEN, message).SerializeToString()
            found.append((f"{method.name} {'.'.join(path)} of {count}", data))
    return found


async def send(channel: grpc.aio.Channel, path: str, method: MethodDescriptor, data: bytes) -> str | None:
    """Return what is wrong with the answer."""

    async def messages() -> AsyncIterator[bytes]:
        yield data

    call: Any = channel.stream_stream(path)(messages(), timeout=120)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
            return f"{error.code().name}: {(error.details() or '')[:200]}"
    return None


async def bystander(channel: grpc.aio.Channel) -> None:
    """Generate until cancelled."""
    request = generation_pb2.GenerateStreamRequest(text="a", stopping={"max_tokens": 150, "ignore_eos": True})
    call = channel.unary_stream(
        "/specdec.api.v1.GenerationService/GenerateStream",
        request_serializer=generation_pb2.GenerateStreamRequest.SerializeToString,
    )
    while True:
        async for _ in call(request):
            pass


async def step_times_ms(channel: grpc.aio.Channel, after: int) -> dict[int, float]:
    """The times of the engine's steps after number ``after``."""
    call = channel.unary_unary(
        "/specdec.api.v1.ModelService/GetTrace",
        request_serializer=model_pb2.GetTraceRequest.SerializeToString,
        response_deserializer=model_pb2.GetTraceResponse.FromString,
    )
    found = (await call(model_pb2.GetTraceRequest(limit=MAX_TRACE_STEPS))).steps_json
    steps = [trace_step(json.loads(step)) for step in found]
    return {
        s.step: s.plan_ms + s.realised_draft_ms + s.realised_verify_ms + s.commit_ms for s in steps if s.step > after
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_longest_lists_with_other_running_streams() -> None:
    async with fuzzed_server() as fuzzed, grpc.aio.insecure_channel(fuzzed.server.grpc_address) as channel:
        settled = await settled_bytes(fuzzed.server)
        bystanders = [asyncio.create_task(bystander(channel)) for _ in range(2)]
        with livez_watch(fuzzed.server.http_port):
            worst = await throw_lists(fuzzed, channel)
        for task in bystanders:
            task.cancel()
        await asyncio.gather(*bystanders, return_exceptions=True)
        ratio, name, longest, usual = max(worst)
        print(f"longest step {longest:.1f} ms, {ratio:.1f} times the median of {usual:.1f} ms, with {name}")
        await fuzzed.unharmed()
        await assert_returned(fuzzed.server, settled)


async def throw_lists(fuzzed: FuzzedServer, channel: grpc.aio.Channel) -> list[tuple[float, str, float, float]]:
    """Send every long message `_AT_ONCE` times at once, repeatedly.

    Returns by message the ratio of the longest step to the median, its name, and both in milliseconds.
    """
    found, last_step = [], 0
    for path, method in METHODS.items():
        for name, data in long_messages(method):
            longest, usual = [], []
            for _ in range(_REPEATS):
                problems = await asyncio.gather(*(send(channel, path, method, data) for _ in range(_AT_ONCE)))
                fuzzed.problems += [f"{name}: {problem}" for problem in problems if problem]
                steps = await step_times_ms(channel, last_step)
                last_step = max(steps, default=last_step)
                longest.append(max(steps.values(), default=0.0))
                usual += steps.values()
            if usual:  # a step that is long by chance is not the longest of every repeat
                found.append((min(longest) / median(usual), name, min(longest), median(usual)))
    return found
