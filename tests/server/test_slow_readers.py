"""Stalled readers: their pending output is bounded, and no other reader is affected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from server import request_stream
from server.admission import run_requests
from server.errors import SlowReaderError
from server.observe.observer import Observer
from server.request_stream import RequestStream, UnreadEvents, weight_of
from specdec.core.types import Delta, Request, RequestEvent, TokenLogprobs
from tests.server.harness import running_server, stream_request


def delta(text: str = "a") -> Delta:
    return Delta("r", 0, [1], text)


def streams(unread: UnreadEvents, count: int) -> tuple[list[RequestStream], list[int]]:
    """Streams, and the numbers of the aborted ones."""
    aborted: list[int] = []

    def stream(i: int) -> RequestStream:
        request = Request(str(i), (1,))
        return RequestStream(
            request, lambda complete: None if complete else aborted.append(i), Observer().request(request), unread
        )

    return [stream(i) for i in range(count)], aborted


async def test_the_reader_with_the_most_pending_output_is_ended() -> None:
    unread = UnreadEvents(10 * weight_of(delta()))
    (slow, quick, idle), aborted = streams(unread, 3)
    idle.push(delta())
    for _ in range(9):
        slow.push(delta())
        assert aborted == []
        quick.push(delta())
        await anext(quick)
    assert aborted == [0]
    with pytest.raises(SlowReaderError):
        await anext(slow)
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    assert isinstance(await anext(idle), Delta)
    assert unread.total == 0


async def test_a_disconnect_releases_the_pending_output() -> None:
    unread = UnreadEvents()
    (one,), _ = streams(unread, 1)
    for _ in range(5):
        one.push(delta())
    assert unread.total == 5 * weight_of(delta())
    one.close()
    assert unread.total == 0


async def test_several_prompts_are_consumed_no_faster_than_read() -> None:
    taken = 0

    async def endless() -> AsyncIterator[RequestEvent]:
        nonlocal taken
        while True:
            taken += 1
            await asyncio.sleep(0)
            yield delta()

    class Endless:
        def __aiter__(self) -> AsyncIterator[RequestEvent]:
            return endless()

        def close(self) -> None:
            pass

    admission: Any = SimpleNamespace(admit=lambda *_, **__: Endless())
    async with aclosing(run_requests(admission, [Request("0", (1,)), Request("1", (1,))])) as events:
        for read in range(1, 20):
            await anext(events)
            for _ in range(20):
                await asyncio.sleep(0)
            assert taken <= read + 4


def test_large_fields_of_a_delta_count() -> None:
    rows = [TokenLogprobs(1, -1.0, [(i, -1.0) for i in range(20)])]
    assert weight_of(Delta("r", 0, [1], "a", rows)) > 2000
    assert weight_of(delta("a" * 10_000)) > 10_000


async def test_stalled_readers_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream.UnreadEvents.__init__, "__defaults__", (LIMIT := 1 << 20,))
    async with running_server() as server:
        table = server.serving.client._table
        unread, submit, submitted, most = table._unread, table.submit, [], 0
        monkeypatch.setattr(table, "submit", lambda request: submitted.append(request) or submit(request))
        calls = [server.generation.GenerateStream(stream_request("x" * 120, n=16)) for _ in range(12)]
        async with asyncio.timeout(20):
            while len(submitted) < len(calls) or server.serving.client.in_flight:
                most = max(most, unread.total)
                await asyncio.sleep(0.005)
            text = [message async for message in server.generation.GenerateStream(stream_request("hello"))]
        assert text[-1].WhichOneof("event") == "finished"
        assert most <= LIMIT
        ends = [await end_of(call) for call in calls]
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in ends
        assert unread.total == 0


async def end_of(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Read on to the end."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
