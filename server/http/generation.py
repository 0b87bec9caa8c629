"""Gives requests to the engine and reads their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from server.engine_client import EngineClient
from server.request_errors import DeadlinePassedError
from server.request_stream import RequestStream
from specdec.errors import RequestError
from specdec.types import Delta, Finished, FinishReason, Request, RequestEvent


async def generate(client: EngineClient, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestEvent]]:
    """The events of ``requests``, one per prompt, as they come: (which request, event).

    Samples are numbered through: sample i of request r is r * n + i. To be read inside `contextlib.aclosing`: closing
    it, by an error or a cancellation too, ends all requests in the engine at once.

    Raises:
        RequestError: the engine refuses or fails one of them.
    """
    streams: list[RequestStream] = []
    try:
        for request in requests:
            streams.append(client.generate(request))  # noqa: PERF401 - those before a refused one must be closed
        n = requests[0].sampling.n
        async with aclosing(_merged(streams) if len(streams) > 1 else _single(streams[0])) as events:
            async for which, event in events:
                if isinstance(event, Finished) and event.reason == FinishReason.DEADLINE:
                    raise DeadlinePassedError
                if isinstance(event, Delta | Finished):
                    event.index += which * n
                yield which, event
    finally:
        for stream in streams:
            stream.close()


async def _single(stream: RequestStream) -> AsyncGenerator[tuple[int, RequestEvent]]:
    async for event in stream:
        yield 0, event


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestEvent]]:
    queue: asyncio.Queue[tuple[int, RequestEvent | RequestError | None]] = asyncio.Queue()

    async def pump(which: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                queue.put_nowait((which, event))
            queue.put_nowait((which, None))
        except RequestError as error:
            queue.put_nowait((which, error))

    pumps = [asyncio.create_task(pump(which, stream)) for which, stream in enumerate(streams)]
    try:
        left = len(pumps)
        while left:
            which, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, RequestError):
                raise item
            else:
                yield which, item
    finally:
        for task in pumps:
            task.cancel()
