"""Carries a call's requests out and gathers what the engine says, as a stream or in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.auth.principal import current_caller
from server.hold_headers import precedes_tokens
from server.http.call import Call
from server.json_body import write_json
from server.request_stream import RequestStream
from server.served_model import ServedModel
from specdec.core.types import (
    Delta,
    DrafterStats,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    TokenLogprobs,
)
from specdec.errors import RequestError

MEDIA_TYPE = b"text/event-stream"
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return b"data: %b\n\n" % write_json(value)


def named_event(value: dict[str, Any]) -> bytes:
    """One event of ``value``, which is named by its ``type``."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), write_json(value))


@dataclass(slots=True)
class Sample:
    """Sample ``index`` of a call, of its prompt number ``prompt``; ``end`` is None until it finished."""

    prompt: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None


@dataclass(slots=True)
class Totals:
    """Sums over prompts and samples; a prompt counts once whatever its number of samples. ``seed`` is that of the
    first prompt to start; ``resumed_tokens`` of the output came with the call."""

    seed: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    resumed_tokens: int = 0
    finished: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, event: RequestEvent) -> None:
        """Count ``event``."""
        if isinstance(event, Delta):
            self.output_tokens += len(event.token_ids)
        elif isinstance(event, Started):
            self.seed = event.seed if self.seed is None else self.seed
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
            self.resumed_tokens += event.resumed_tokens
            self.output_tokens += event.resumed_tokens
        elif isinstance(event, Finished):
            self.finished += 1
            self.accepted_prediction_tokens += event.usage.accepted_prediction_tokens
            self.rejected_prediction_tokens += event.usage.rejected_prediction_tokens
            _add_stats(self.stats, event.stats)


def _add_stats(total: SpeculationStats, part: SpeculationStats) -> None:
    total.num_steps += part.num_steps
    total.num_spec_steps += part.num_spec_steps
    total.num_draft_tokens += part.num_draft_tokens
    total.num_accepted_draft_tokens += part.num_accepted_draft_tokens
    histogram, more = total.acceptance_histogram, part.acceptance_histogram
    histogram += [0] * (len(more) - len(histogram))
    for accepted, steps in enumerate(more):
        histogram[accepted] += steps
    for name, drafter in part.by_drafter.items():
        mine = total.by_drafter.setdefault(name, DrafterStats())
        mine.num_draft_tokens += drafter.num_draft_tokens
        mine.num_accepted_draft_tokens += drafter.num_accepted_draft_tokens


async def generate(
    model: ServedModel, requests: Sequence[Request], *, share: bool = False, supersedes_key: str = ""
) -> AsyncGenerator[tuple[int, RequestEvent]]:
    """The events of ``requests``, one per prompt, as they come: (which request, event).

    Samples are numbered through: sample i of request r is r * n + i. To be read inside `contextlib.aclosing`: closing
    it, by an error or a cancellation too, ends all requests in the engine at once. ``share``: a single request may be
    answered with the events of an equal one that runs already (`model.completion.runs.RequestCoalescer`).
    ``supersedes_key``: ends the running request of the same tenant with the same one, for the first of ``requests``.

    Raises:
        RequestError: the caller may not, or the engine refuses or fails one of them.
    """
    if share and len(requests) == 1:
        async with aclosing(_shared(model, requests[0], supersedes_key)) as events:
            async for event in events:
                yield 0, event
        return
    streams: list[RequestStream] = []
    try:
        for i, request in enumerate(requests):
            key = "" if i else supersedes_key
            streams.append(model.admission.admit(current_caller(), request, key))
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
            return
        n = requests[0].sampling.n
        async with aclosing(_merged(streams)) as events:
            async for which, event in events:
                if isinstance(event, Delta | Finished):
                    event.index += which * n
                yield which, event
    finally:
        for stream in streams:
            stream.close()


async def _shared(model: ServedModel, request: Request, supersedes_key: str) -> AsyncGenerator[RequestEvent]:
    run, _ = await model.completion.runs.start(current_caller(), request, supersedes_key)
    try:
        async for event in run.read():
            yield event
    finally:
        run.leave()


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestEvent]]:
    # What a slow client leaves stays with its streams, where it is bounded.
    queue: asyncio.Queue[tuple[int, RequestEvent | RequestError | None]] = asyncio.Queue(len(streams))

    async def pump(which: int, stream: RequestStream) -> None:
        try:
            async for event in stream:
                await queue.put((which, event))
            await queue.put((which, None))
        except RequestError as error:
            await queue.put((which, error))

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


class StreamWriter(Protocol):
    """Turns events into what a client reads. ``media_type``: of the whole stream."""

    media_type: bytes

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """What the event adds to the stream; empty: nothing yet."""

    def last(self) -> bytes:
        """What ends the stream."""


async def stream_answer(call: Call, requests: Sequence[Request], writer: StreamWriter, *, share: bool = False) -> None:
    """Answer with a stream. It begins with the engine's first word, so that a refusal still is a status of its own, or
    where headers are held with the first token, so that whatever fails before is one too;
    the end goes out together with the last event, or behind it where a sample was cut off, since the reason may follow.
    ``share``: callers of one tenant who ask for the same at the same time get the same, or at least one prompt's work
    is done once.

    Raises:
        RequestError: the engine refuses or fails one of them.
    """
    hold, held = call.holds_headers, b""
    left, cut = sum(request.sampling.n for request in requests), False
    async with aclosing(generate(call.model, requests, share=share, supersedes_key=call.supersedes_key)) as events:
        async for prompt, event in events:
            data = writer.take(prompt, event)
            if hold:
                data = held = held + data
                if precedes_tokens(event):
                    continue
                hold = False
            if not call.began:
                await call.start_stream(writer.media_type)
            if isinstance(event, Finished):
                left -= 1
                cut = cut or event.reason is FinishReason.ABORTED
            if not left and not cut:
                await call.finish(data + writer.last())
            elif data:
                await call.write(data)
    if cut:
        await call.finish(writer.last())


async def whole_answer(call: Call, requests: Sequence[Request], *, share: bool = False) -> tuple[list[Sample], Totals]:
    """Every sample, finished, in order, and what they amount to; shares and raises as `stream_answer`."""
    n, totals = requests[0].sampling.n, Totals()
    samples = [Sample(index // n, index) for index in range(n * len(requests))]
    async with aclosing(generate(call.model, requests, share=share, supersedes_key=call.supersedes_key)) as events:
        async for _, event in events:
            totals.add(event)
            if isinstance(event, Delta):
                sample = samples[event.index]
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
            elif isinstance(event, Finished):
                samples[event.index].end = event
    return samples, totals
