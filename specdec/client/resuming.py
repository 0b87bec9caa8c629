"""Streams that resume at the same token after a failure, on another server if need be."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as generation
from specdec.client.connection import CallError, Connection, Method, RetryPolicy, end_of, time_left
from specdec.client.messages import event_of
from specdec.core.types import Delta, Finished, RequestEvent, Started, sample_seed
from specdec.errors import FingerprintMismatchError

Message = generation.GenerateStreamRequest | completion.CompleteRequest

_ONCE = RetryPolicy(attempts=1)


@dataclass(slots=True)
class _Received:
    """The part of a sample that has arrived."""

    index: int
    tokens: list[int] = field(default_factory=list)
    characters: int = 0  # of the text
    finished: bool = False

    def take(self, event: Delta | Finished) -> None:
        """Add the sample's next event."""
        if isinstance(event, Delta):
            self.tokens += event.token_ids
            self.characters += len(event.text)
        else:
            self.finished = True


class ResumableStream:
    """One streamed request by ``method``.

    Its events are those of an unbroken stream: one Started, every token and character once, one Finished per sample,
    whose statistics and timings cover only the last part.

    A stream resumes only on a server with the same numeric fingerprint, and with the same seed. Each sample resumes by
    a call of its own; the ids of the second and later ones end with ``~`` and the sample's index. If the server still
    runs the broken call, ``~`` is appended to the id. The calls run at once, so that a deadline or time limit leaves as
    much time to each sample as in an unbroken stream. Those for which the key's ``max_concurrent`` leaves no place run
    afterwards, one by one. Only the first call carries the ``supersedes_key``, because the calls would otherwise
    supersede each other; if it is superseded, all end.
    """

    def __init__(self, connection: Connection, method: Method, message: Message, timeout_s: float | None) -> None:
        self._connection, self._method, self._message = connection, method, message
        self._began_s, self._until = time.monotonic(), end_of(timeout_s)
        self._first_token_s: float | None = None
        self._started: Started | None = None

    async def events(self) -> AsyncGenerator[RequestEvent, None]:
        """The events; close it to cancel the request.

        Raises:
            CallError: it failed and cannot be resumed.
        """
        samples: dict[int, _Received] = {}
        n_samples = max(1, self._message.sampling.n)
        try:
            async with aclosing(self._call(self._message)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        self._started = event
                    else:
                        if event.index not in samples:
                            samples[event.index] = _Received(event.index)
                        samples[event.index].take(event)
                    yield event
            return
        except CallError as error:
            lost = error.code == grpc.StatusCode.UNAVAILABLE
            if lost and sum(had.finished for had in samples.values()) == n_samples:
                return  # every sample is complete; only the end of the call is missing
            started = self._started
            if not (lost and started and started.numeric_fingerprint and self._connection.retry.resumes):
                raise
            stopped = error.engines_stopped
            await self._connection.pause(error, 1, self._until, self._connection.retry.resuming)
        received = (samples.get(index) or _Received(index) for index in range(n_samples))
        missing = [had for had in received if not had.finished]
        suffixes = ["", *(f"~{had.index}" for had in missing[1:])]
        beside = len(missing) > 1
        calls = [self._rest(*each, stopped, beside=beside) for each in zip(missing, suffixes, strict=True)]
        async with aclosing(_merged(calls)) as rest:
            async for event in rest:
                yield event
        for had, suffix in zip(missing, suffixes, strict=True):
            if not had.finished:
                async with aclosing(self._rest(had, suffix, stopped)) as rest:
                    async for event in rest:
                        yield event

    async def _rest(
        self, had: _Received, suffix: str, stopped: int, *, beside: bool = False
    ) -> AsyncGenerator[Delta | Finished, None]:
        """The rest of a sample, over any number of calls. suffix: of their ids; empty for the first sample. stopped:
        engines that stopped before. beside: other samples run, which may take all places of the key; then it ends."""
        retry, attempt, first = self._connection.retry.resuming, 1, not suffix
        refused: set[str] = set()  # addresses of servers with another fingerprint
        while True:
            known = len(had.tokens)
            try:
                async with aclosing(self._call(self._resumed(had, suffix, first), _ONCE)) as events:
                    async for event in events:
                        if isinstance(event, Started):
                            self._check_prompt(event)
                            continue
                        event.index = had.index
                        had.take(event)
                        yield event
                return
            except CallError as error:
                if len(had.tokens) > known:  # one that stops engines would have stopped this one at the same token
                    attempt = stopped = 0
                attempt += 1
                error.engines_stopped = stopped = error.engines_stopped + stopped
                if had.finished and error.code == grpc.StatusCode.UNAVAILABLE:
                    return
                if beside and error.metadata.get("limit") == "max_concurrent":
                    return
                if error.code == grpc.StatusCode.ALREADY_EXISTS and attempt <= retry.attempts:
                    suffix += "~"  # the server still runs the broken call
                    continue
                if error.reason == FingerprintMismatchError.reason:
                    again = error.address in refused
                    refused.add(error.address)
                    self._connection.leave(error.address)
                    if self._connection.address not in refused:
                        if not again:
                            continue
                        error.code = grpc.StatusCode.UNAVAILABLE  # the servers of the other addresses may come back
                await self._connection.pause(error, attempt, self._until, retry)

    async def _call(
        self, message: Message, retry: RetryPolicy | None = None
    ) -> AsyncGenerator[Started | Delta | Finished, None]:
        """The events of one call, as `Connection.stream`."""
        stream = self._connection.stream(self._method, message, time_left(self._until), retry)
        async with aclosing(stream) as responses:
            async for response in responses:
                event = event_of(response, self._message.request_id)
                if isinstance(event, Delta) and self._first_token_s is None:
                    self._first_token_s = time.monotonic()
                if event is not None:
                    yield event

    def _check_prompt(self, now: Started) -> None:
        """Raise if the prompt differs: a chat template may contain the date, for example."""
        assert self._started is not None  # nothing broke off before
        had = self._started
        if (now.prompt_tokens, now.prompt_digest) != (had.prompt_tokens, had.prompt_digest):
            raise CallError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the prompt differs ({had.prompt_tokens} tokens before, {now.prompt_tokens} now); send a new request",
            )

    def _resumed(self, had: _Received, suffix: str, first: bool) -> Message:
        """The request that resumes one sample."""
        started = self._started
        assert started is not None  # nothing broke off before
        message = copy.deepcopy(self._message)
        message.request_id += suffix
        if not first:
            message.scheduling.ClearField("supersedes_key")
        message.sampling.seed, message.sampling.n = sample_seed(started.seed, had.index), 1
        message.resume.numeric_fingerprint = started.numeric_fingerprint
        message.resume.token_ids[:] = [*self._message.resume.token_ids, *had.tokens]
        # The characters before this stream are known only if the caller, which resumed one itself, says so.
        if not self._message.HasField("resume") or self._message.resume.HasField("text_characters"):
            message.resume.text_characters = self._message.resume.text_characters + had.characters
        now, stopping = time.monotonic(), message.stopping
        if stopping.HasField("time_limit_ms"):
            stopping.time_limit_ms = max(1.0, stopping.time_limit_ms - (now - self._began_s) * 1e3)
        if stopping.HasField("decode_time_limit_ms") and self._first_token_s is not None:
            stopping.decode_time_limit_ms = max(1.0, stopping.decode_time_limit_ms - (now - self._first_token_s) * 1e3)
        return message


async def _merged(
    streams: Sequence[AsyncGenerator[Delta | Finished, None]],
) -> AsyncGenerator[Delta | Finished, None]:
    """The events of several streams in order of arrival; raises the first error."""
    queue: asyncio.Queue[Delta | Finished | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Delta | Finished, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:  # raised again by the reader
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
