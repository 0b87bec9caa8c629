"""A stream that goes on where it broke off: at the same token, on whichever server answers."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as generation
from specdec.client.connection import CallError, Connection, Method, RetryPolicy, cut_of, end_of, time_left
from specdec.client.messages import event_of
from specdec.core.seeds import sample_seed
from specdec.core.types import Delta, Finished, RequestEvent, Started

Message = generation.GenerateStreamRequest | completion.CompleteRequest


@dataclass(slots=True)
class _Had:
    """What came of sample ``index`` of a request: tokens, and characters of their text."""

    index: int
    tokens: list[int] = field(default_factory=list)
    characters: int = 0
    finished: bool = False

    def take(self, event: Delta | Finished) -> None:
        """The next event of it."""
        if isinstance(event, Delta):
            self.tokens += event.token_ids
            self.characters += len(event.text)
        else:
            self.finished = True


class ResumableStream:
    """One streamed request by ``method``. ``events`` are those of a stream that nothing happens to: one Started, every
    token and character once, one Finished per sample, whose statistics and timings are of its last part alone.

    It goes on only on a server that says the same bits (`Started.numeric_fingerprint`), with the seed that was in
    force; of several samples each by a call of its own, the second and further ones with ``~`` and their index behind
    the id. Where the broken call is still in flight on the server that is reached, the resumed one has another id, with
    ``~`` behind it. The first of the calls alone has the ``supersedes_key``, or they would end each other; if it is
    superseded, all end.
    """

    def __init__(self, connection: Connection, method: Method, message: Message, timeout_s: float | None) -> None:
        self._connection, self._method, self._message = connection, method, message
        self._began_s, self._until = time.monotonic(), end_of(timeout_s)
        self._first_token_s: float | None = None
        self._started: Started | None = None

    async def events(self) -> AsyncGenerator[RequestEvent, None]:
        """The events; close it to cancel the request.

        Raises:
            CallError: it failed, and can not be gone on with.
        """
        samples = [_Had(index) for index in range(max(1, self._message.sampling.n))]
        try:
            async with aclosing(self._call(self._message)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        self._started = event
                    else:
                        samples[event.index].take(event)
                    yield event
            return
        except CallError as error:
            cut = cut_of(error)
            if cut is not None and all(had.finished for had in samples):
                return  # all was said; only the call's own end is missing
            if cut is None or not self._can_resume:
                raise
            await self._connection.pause(cut, 1, self._until, self._connection.retry.resuming)
        missing = [had for had in samples if not had.finished]
        calls = [self._rest(had, "" if had is missing[0] else f"~{had.index}") for had in missing]
        async with aclosing(_merged(calls)) as rest:
            async for event in rest:
                yield event

    @property
    def _can_resume(self) -> bool:
        started = self._started is not None and bool(self._started.numeric_fingerprint)
        return started and self._connection.retry.resumes > 0

    async def _rest(self, had: _Had, suffix: str) -> AsyncGenerator[Delta | Finished, None]:
        """What is missing of a sample, over as many calls as it takes. suffix: of their ids; empty: of the first."""
        retry, attempt, first = self._connection.retry.resuming, 0, not suffix
        while True:
            known, began = len(had.tokens), False
            try:
                async with aclosing(self._call(self._resumed(had, suffix, first), retry)) as events:
                    async for event in events:
                        began = True
                        if isinstance(event, Started):
                            self._check_prompt(event)
                            continue
                        event.index = had.index
                        had.take(event)
                        yield event
                return
            except CallError as error:
                cut = cut_of(error)
                if cut is not None and had.finished:
                    return
                attempt = 1 if len(had.tokens) > known else attempt + 1
                if error.code == grpc.StatusCode.ALREADY_EXISTS and not began and attempt <= retry.attempts:
                    suffix += "~"  # the server has not noticed yet that the former call broke off
                    continue
                if cut is None or not began:
                    raise  # it is refused, or was tried again as often as it may be
                await self._connection.pause(cut, attempt, self._until, retry)

    async def _call(
        self, message: Message, retry: RetryPolicy | None = None
    ) -> AsyncGenerator[Started | Delta | Finished, None]:
        """One call's events."""
        stream = self._connection.stream(self._method, message, time_left(self._until), retry)
        async with aclosing(stream) as responses:
            async for response in responses:
                event = event_of(response, self._message.request_id)
                if isinstance(event, Delta) and self._first_token_s is None:
                    self._first_token_s = time.monotonic()
                if event is not None:
                    yield event

    def _check_prompt(self, now: Started) -> None:
        """A template that tells the date, say, makes another prompt of the same conversation on another day."""
        assert self._started is not None  # nothing broke off before
        had = self._started
        if (now.prompt_tokens, now.prompt_digest) != (had.prompt_tokens, had.prompt_digest):
            told = f"the prompt, of {now.prompt_tokens} tokens here and {had.prompt_tokens} where the stream began, is "
            told += "another one here; ask anew"
            raise CallError(grpc.StatusCode.FAILED_PRECONDITION, told)

    def _resumed(self, had: _Had, suffix: str, first: bool) -> Message:
        """The request as one sample's that goes on behind what came."""
        started = self._started
        assert started is not None  # nothing broke off before
        message = copy.deepcopy(self._message)
        message.request_id += suffix
        if not first:
            message.scheduling.ClearField("supersedes_key")
        message.sampling.seed, message.sampling.n = sample_seed(started.seed, had.index), 1
        message.resume.numeric_fingerprint = started.numeric_fingerprint
        message.resume.token_ids[:] = [*self._message.resume.token_ids, *had.tokens]
        # What came before this call, if the caller resumed by itself, is only known with all its text.
        if not self._message.HasField("resume") or self._message.resume.HasField("text_characters"):
            message.resume.text_characters = self._message.resume.text_characters + had.characters
        now, stopping = time.monotonic(), message.stopping
        if stopping.HasField("time_limit_ms"):
            stopping.time_limit_ms = max(1.0, stopping.time_limit_ms - (now - self._began_s) * 1e3)
        if stopping.HasField("decode_time_limit_ms") and self._first_token_s is not None:
            stopping.decode_time_limit_ms = max(1.0, stopping.decode_time_limit_ms - (now - self._first_token_s) * 1e3)
        return message


Event = TypeVar("Event")


async def _merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """What comes of several streams, as it comes; raises what the first one that fails does."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:  # raised again by who reads
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
