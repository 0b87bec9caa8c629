"""A specdec server over gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from bench.serve.ask import Ask
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from bench.serve.said import Said
from specdec.client import CallError, Client, CompletionHints, Credentials, RetryPolicy
from specdec.client.generate_options import GenerateOptions
from specdec.types import Delta, Finished, RequestEvent, SamplingParams, Started, StoppingParams

_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_HINTS = CompletionHints(mode="middle_or_prefix")


class GrpcEndpoint:
    """GenerateStream for texts and conversations, Complete for gaps; nothing is tried twice. Use in one event loop.

    asked: further options of every request; those that an `Ask` has are taken from there.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        temperature: float = 0.0,
        asked: GenerateOptions | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._client = Client(address, credentials, RetryPolicy(attempts=1))
        self._sampling, self._asked = SamplingParams(temperature=temperature), asked or GenerateOptions()
        self._deadline_s = deadline_s

    async def send(self, ask: Ask, record: Record) -> None:
        """As `Endpoint.send`."""
        try:
            async with aclosing(self._events(ask)) as events:
                await _note(events, record)
        except CallError as error:
            if error.code in _BUSY and error.reached:
                raise RefusedError(str(error), error.retry_after_s) from None
            raise

    async def close(self) -> None:
        """As `Endpoint.close`."""
        await self._client.close()

    def _events(self, ask: Ask) -> AsyncGenerator[RequestEvent, None]:
        options: GenerateOptions = {
            **self._asked, "sampling": dataclasses.replace(ask.sampling or self._sampling, seed=ask.seed),
            "stopping": StoppingParams(max_tokens=ask.max_tokens, stop=ask.stop, ignore_eos=ask.fixed),
            "prediction": ask.prediction, "session": ask.session, "cache_salt": ask.salt,
        }  # fmt: skip
        if self._deadline_s is not None:
            options["timeout_s"] = self._deadline_s
        if ask.gap is not None:
            return self._client.completion.complete(ask.gap, _HINTS, **options)
        return self._client.stream(ask.ids or ask.chat or ask.text, **options)


async def _note(events: AsyncGenerator[RequestEvent, None], record: Record) -> None:
    clock = asyncio.get_running_loop().time
    held = 0  # tokens whose text did not come yet
    said = Said()
    said.ids(())
    async for event in events:
        if isinstance(event, Delta):
            held += len(event.token_ids)
            said.ids(event.token_ids)
            if event.text:
                record.chunk(clock(), held)
                said.text(event.text)
                held = 0
        elif isinstance(event, Started):
            record.queue_ms = event.queue_ms
        elif isinstance(event, Finished):
            record.prompt_tokens, record.cached_tokens = event.usage.prompt_tokens, event.usage.cached_tokens
            record.output_tokens = event.usage.output_tokens
            record.steps(event.stats.num_steps, event.stats.num_spec_steps, event.stats.acceptance_histogram)
    said.note(record)
