"""Carries requests out for a call, as a stream or in one piece, in whatever words a dialect has for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

from server.http.call import Call
from server.http.generation import generate
from server.http.sample import Sample
from server.http.totals import Totals
from specdec.types import Delta, Finished, FinishReason, Request, RequestEvent


class StreamWriter(Protocol):
    """Turns events into what a client reads. ``media_type``: of the whole stream."""

    media_type: bytes

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """What the event adds to the stream; empty: nothing yet."""

    def last(self) -> bytes:
        """What ends the stream."""


async def stream_answer(call: Call, requests: Sequence[Request], writer: StreamWriter, *, share: bool = False) -> None:
    """Answer with a stream. It begins with the engine's first word, so that a refusal still is a status of its own;
    the end goes out together with the last event, or behind it where a sample was cut off, since the reason may follow.
    ``share``: callers of one tenant who ask for the same at the same time get the same, or at least one prompt's work
    is done once.

    Raises:
        RequestError: the engine refuses or fails one of them.
    """
    left, cut = sum(request.sampling.n for request in requests), False
    async with aclosing(generate(call.face, requests, share=share, supersedes_key=call.supersedes_key)) as events:
        async for prompt, event in events:
            data = writer.take(prompt, event)
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
    async with aclosing(generate(call.face, requests, share=share, supersedes_key=call.supersedes_key)) as events:
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
