"""A specdec server over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from bench.serve.ask import Ask
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from specdec.client import CallError, Client, CompletionHints, Credentials, RetryPolicy
from specdec.client.generate_options import GenerateOptions
from specdec.types import (
    Delta,
    Finished,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)

_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_HINTS = CompletionHints(mode="middle_or_prefix")


class GrpcEndpoint:
    """GenerateStream for texts and conversations, Complete for gaps; nothing is tried twice. Use in one event loop."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        temperature: float = 0.0,
        speculation: SpeculationMode = SpeculationMode.AUTO,
        deadline_s: float | None = None,
    ) -> None:
        self._client = Client(address, credentials, RetryPolicy(attempts=1))
        self._sampling, self._speculation = SamplingParams(temperature=temperature), SpeculationParams(speculation)
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
        options = GenerateOptions(
            sampling=self._sampling,
            stopping=StoppingParams(max_tokens=ask.max_tokens, stop=ask.stop, ignore_eos=ask.fixed),
            speculation=self._speculation, prediction=ask.prediction, session=ask.session, cache_salt=ask.salt,
        )  # fmt: skip
        if self._deadline_s is not None:
            options["timeout_s"] = self._deadline_s
        if ask.gap is not None:
            return self._client.completion.complete(ask.gap, _HINTS, **options)
        return self._client.stream(ask.chat or ask.text, **options)


async def _note(events: AsyncGenerator[RequestEvent, None], record: Record) -> None:
    clock = asyncio.get_running_loop().time
    held = 0  # tokens whose text did not come yet
    async for event in events:
        if isinstance(event, Delta):
            held += len(event.token_ids)
            if event.text:
                record.chunk(clock(), held)
                held = 0
        elif isinstance(event, Finished):
            record.prompt_tokens, record.cached_tokens = event.usage.prompt_tokens, event.usage.cached_tokens
            record.output_tokens = event.usage.output_tokens
            if event.stats.num_steps:
                record.tokens_per_step = event.usage.output_tokens / event.stats.num_steps
