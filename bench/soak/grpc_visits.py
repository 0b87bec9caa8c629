"""Calls over gRPC: to their end, left on the way, cut by a deadline, aborted, superseded, read slowly."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from bench.soak.place import Place
from bench.soak.soak_fault import SoakFault
from bench.soak.wishes import some_options
from specdec.client import CallError, ChatTurn, CompletionHints, Fim
from specdec.client.prompt import Prompt
from specdec.types import Delta, Finished, FinishReason, OutputParams, RequestEvent, StoppingParams

OK, LEFT = "ok", "left"
_FAULTS = (
    grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
)  # fmt: skip
_HINTS = CompletionHints(mode="middle_or_prefix")


def refused(error: CallError) -> str:
    """How an orderly refusal is counted.

    Raises:
        SoakFault: it is none.
    """
    if error.code in _FAULTS:
        raise SoakFault(f"{error.code.name}: {error.message}")
    return f"refused {error.reason or error.code.name}"


async def whole_stream(place: Place) -> str:
    """A text or a conversation, read to its end."""
    options, samples = some_options(place)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def whole_answer(place: Place) -> str:
    """The answer in one message."""
    options, samples = some_options(place)
    try:
        answer = await place.client.generate(_prompt(place), **options)
    except CallError as error:
        return refused(error)
    return _complete(len(answer.samples), samples)


async def gap(place: Place) -> str:
    """A gap to fill in."""
    text = place.cut()
    half = len(text) // 2
    stopping = StoppingParams(max_tokens=24)
    events = place.client.completion.complete(Fim(text[:half], text[half:]), _HINTS, stopping=stopping)
    return await _to_the_end(events, 1)


async def leave_after_some(place: Place) -> str:
    """Cancels at one of the first events."""
    options, _ = some_options(place)
    left = place.random.randrange(12)
    try:
        async with aclosing(place.client.stream(_prompt(place), **options)) as events:
            async for _ in events:
                if left == 0:
                    return LEFT
                left -= 1
    except CallError as error:
        return refused(error)
    return OK


async def leave_any_time(place: Place) -> str:
    """Cancels wherever the call is then: before it is admitted, in the queue, in its prompt, in its output."""
    reading = asyncio.create_task(whole_stream(place))
    await asyncio.wait([reading], timeout=place.random.choice((0.0, 0.002, 0.02, 0.2, 1.0)))
    if reading.done():
        return reading.result()
    reading.cancel()
    await asyncio.wait([reading])
    return LEFT if reading.cancelled() else reading.result()


async def deadline(place: Place) -> str:
    """Has less time than it may take."""
    options, samples = some_options(place)
    options["timeout_s"] = place.random.uniform(0.02, 2.0)
    return await _to_the_end(place.client.stream(_prompt(place), **options), samples)


async def slow_reader(place: Place) -> str:
    """Much to read, and somebody who does not."""
    options, samples = some_options(place)
    options["output"] = OutputParams(logprobs=20, trees=True)
    ended = 0
    try:
        async with aclosing(place.client.stream(_prompt(place), **options)) as events:
            async for event in events:
                ended += isinstance(event, Finished)
                await asyncio.sleep(place.random.choice((0.0, 0.05, 0.3)))
    except CallError as error:
        return refused(error)
    return _complete(ended, samples)


async def aborted(place: Place) -> str:
    """Another call ends it."""
    options, samples = some_options(place)
    name = options["request_id"] = uuid.uuid4().hex
    ended = 0
    try:
        async with aclosing(place.client.stream(_prompt(place), **options)) as events:
            async for event in events:
                if isinstance(event, Delta) and not ended:
                    await place.client.abort(name)
                ended += isinstance(event, Finished)
    except CallError as error:
        return refused(error)
    return _complete(ended, samples)


async def superseded(place: Place) -> str:
    """Two of the same key: the second takes the place of the first."""
    (first, samples), (second, others) = some_options(place), some_options(place)
    first["supersedes_key"] = second["supersedes_key"] = f"soak-{place.number}"
    running = asyncio.create_task(_to_the_end(place.client.stream(_prompt(place), **first), samples))
    await asyncio.wait([running], timeout=place.random.uniform(0.0, 0.3))
    found = await _to_the_end(place.client.stream(_prompt(place), **second), others)
    await running
    return found


async def prefill(place: Place) -> str:
    """No token at all."""
    try:
        await place.client.prefill(place.cut())
    except CallError as error:
        return refused(error)
    return OK


def _prompt(place: Place) -> Prompt:
    return (ChatTurn("user", place.cut(300)),) if place.random.random() < 0.25 else place.cut()


async def _to_the_end(stream: AsyncGenerator[RequestEvent, None], samples: int) -> str:
    ended, aborts = 0, 0
    try:
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ended += 1
                    aborts += event.reason == FinishReason.ABORTED
    except CallError as error:
        return refused(error)
    return _complete(ended, samples) if not aborts else "aborted"


def _complete(ended: int, samples: int) -> str:
    if ended != samples:
        raise SoakFault(f"a stream ended well with {ended} of {samples} samples")
    return OK
