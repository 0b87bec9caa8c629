"""Runs a call's requests and sends the events as a stream, or collects them into one answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from server.admission import run_requests
from server.errors import GenerationFailedError
from server.hold_headers import from_first_token
from server.http.call import EVENT_STREAM, Call
from server.json_body import write_line
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    TokenLogprobs,
    Usage,
)

DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return b"data: %b\n\n" % write_line(value)


def named_event(value: dict[str, Any]) -> bytes:
    """One event of ``value``, which is named by its ``type``."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), write_line(value))


@dataclass(slots=True)
class Sample:
    """One finished sample of a call."""

    prompt: int  # number of its prompt
    index: int  # number among all samples of the call
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished = field(init=False)


@dataclass(slots=True)
class Totals:
    """Sums over prompts and samples."""

    seed: int | None = None  # of the first prompt to start
    prompt_tokens: int = 0  # each prompt counts once, whatever its number of samples
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    resumed_tokens: int = 0  # output tokens that came with the call
    thought_tokens: int = 0  # output tokens of the model's thoughts, marks included, where they are separated
    omitted: dict[str, int] = field(default_factory=dict)  # of the last prompt, as `omitted_lines`
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
            self.omitted = omitted_lines(event.usage)
            self.stats.add(event.stats)


_OMITTED = ("omitted_prefix_lines", "omitted_suffix_lines", "omitted_file_lines", "omitted_edits")


def omitted_lines(usage: Usage) -> dict[str, int]:
    """What the objective of time to first token left out of the prompt, by the fields of `Usage`."""
    return {name: count for name in _OMITTED if (count := getattr(usage, name))}


class Answer(ABC):
    """What a call asks for, and its dialect's form of the answer."""

    media_type = EVENT_STREAM  # of a stream

    def __init__(self, call: Call, requests: Sequence[Request], *, stream: bool) -> None:
        self.requests, self.stream = requests, stream  # those to be answered, and how
        self.totals = Totals()  # of the events so far
        self._tokenizer = call.model.tokenizer.loaded

    @property
    def request(self) -> Request:
        """The only request, or the first one."""
        return self.requests[0]

    @abstractmethod
    def take(self, event: RequestEvent) -> bytes:
        """The stream's next bytes after ``event``; may be empty."""

    def last(self) -> bytes:
        """The end of the stream."""
        return b""

    @abstractmethod
    def whole(self, samples: Sequence[Sample]) -> Any:
        """The JSON body of an answer in one piece."""


async def answer(call: Call, form: Answer) -> None:
    """Run the requests of ``form``, and answer ``call`` with a stream or in one piece.

    Raises:
        RequestError: the engine refuses a request or fails.
    """
    if form.stream:
        await _stream(call, form)
    else:
        samples, form.totals = await whole_answer(call, form.requests)
        await call.reply(200, form.whole(samples))


def answering(read: Callable[[Call], Awaitable[Answer]]) -> Callable[[Call], Coroutine[Any, Any, None]]:
    """What answers the calls that ``read`` reads, for an `Endpoint`."""

    async def run(call: Call) -> None:
        await answer(call, await read(call))

    return run


async def _stream(call: Call, form: Answer) -> None:
    """Headers wait for the engine's first event, or for the first token if the call holds them, so that an earlier
    failure has a status of its own. The end is sent with the last event; after a sample that was cut off it is sent
    later, because an error may follow."""
    samples, cut = sum(request.sampling.n for request in form.requests), False
    async with aclosing(run_requests(call.model.admission, form.requests, call.supersedes_key)) as events:
        async for event in from_first_token(events, call.holds_headers):
            form.totals.add(event)
            data = form.take(event)
            if not call.began:
                await call.start_stream(form.media_type)
            if isinstance(event, Finished) and event.reason is FinishReason.ABORTED:
                cut = True
            if form.totals.finished == samples and not cut:
                await call.finish(data + form.last())
            elif data:
                await call.write(data)
    if cut:
        await call.finish(form.last())


async def whole_answer(
    call: Call, requests: Sequence[Request], *, most: int | None = None, all_or_none: bool = False
) -> tuple[list[Sample], Totals]:
    """Every sample, finished and in order, and their sums. most: as in `run_requests`.

    Raises:
        RequestError: as in `answer`, or with ``all_or_none`` a request was aborted.
    """
    if not requests:
        return [], Totals()
    n, totals = requests[0].sampling.n, Totals()
    samples = [Sample(index // n, index) for index in range(n * len(requests))]
    async with aclosing(run_requests(call.model.admission, requests, call.supersedes_key, most=most)) as events:
        async for event in events:
            totals.add(event)
            if isinstance(event, Delta):
                sample = samples[event.index]
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
            elif isinstance(event, Finished):
                if all_or_none and event.reason is FinishReason.ABORTED:
                    raise GenerationFailedError("ABORTED", "the request was aborted before its end")
                samples[event.index].end = event
    return samples, totals
