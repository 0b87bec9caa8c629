"""GenerationService: requests in, the engine's events out."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import grpc

from server.admission.admission import Admission
from server.admission.ticket import Ticket
from server.auth.caller import current_caller
from server.frontend import Frontend
from server.grpc.convert import delta_message, finished_message, sample_message, started_message, timings_message
from server.grpc.errors import guarded
from server.grpc.request_reader import read_chat, read_generate, read_prefill
from server.request_errors import DeadlinePassedError
from server.telemetry.current_call import current_arm
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc as pb_grpc
from specdec.api.v1 import options_pb2 as options
from specdec.config import ServerConfig
from specdec.errors import ViolationCollector
from specdec.types import Delta, Finished, FinishReason, Request, RequestEvent, Started

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Each generating call runs inside the gate and inside its ticket's ``async with``: however it ends, by its
    client's cancel, its deadline or an error, the engine is told at once.

    ``admission`` None: one of its own, with the default limits.
    """

    def __init__(self, frontend: Frontend, admission: Admission | None = None) -> None:
        self._frontend = frontend
        self._admission = admission or Admission(frontend.client, ServerConfig())

    @guarded
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The whole answer at once."""
        with self._frontend.gate.enter():
            asked = await read_generate(request, self._frontend)
            response = pb.GenerateResponse(request_id=asked.request_id, model=self._frontend.info.target)
            deltas: dict[int, list[Delta]] = defaultdict(list)
            samples: list[pb.Sample] = []
            async with self._admit(asked, request.scheduling, context) as stream:
                async for event in stream:
                    if isinstance(event, Started):
                        response.seed = event.seed
                    elif isinstance(event, Delta):
                        deltas[event.index].append(event)
                    elif isinstance(event, Finished):
                        _check_deadline(event)
                        samples.append(sample_message(event.index, deltas[event.index], event))
            response.samples.extend(sorted(samples, key=lambda sample: sample.index))
            return response

    @guarded
    async def GenerateStream(self, request: pb.GenerateStreamRequest, context: Context) -> None:  # type: ignore[override]
        """The answer as it is made."""
        with self._frontend.gate.enter():
            asked = await read_generate(request, self._frontend)
            model = self._frontend.info.target
            async with self._admit(asked, request.scheduling, context) as stream:
                async for event in stream:
                    await context.write(_stream_message(event, model))

    @guarded
    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Computes a prompt into the prefix cache."""
        with self._frontend.gate.enter():
            asked = await read_prefill(request, self._frontend)
            response = pb.PrefillResponse(request_id=asked.request_id)
            async with self._admit(asked, request.scheduling, context) as stream:
                async for event in stream:
                    if isinstance(event, Finished):
                        _check_deadline(event)
                        response.prompt_tokens = event.usage.prompt_tokens
                        response.cached_tokens = event.usage.cached_tokens
                        response.timings.CopyFrom(timings_message(event.timings))
            return response

    @guarded
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a request in flight."""
        seen = ViolationCollector()
        seen.check(bool(request.request_id), "request_id", "must not be empty")
        seen.raise_if_any()
        return pb.AbortResponse(aborted=self._admission.abort(current_caller(), request.request_id))

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or a conversation to token ids."""
        seen = ViolationCollector()
        which = request.WhichOneof("input")
        seen.check(which is not None, "input", "one of text and chat is needed")
        seen.raise_if_any()
        if which == "chat":
            ids = await read_chat(request.chat, self._frontend, seen)
            seen.raise_if_any()
        else:
            add_special = request.add_special if request.HasField("add_special") else True
            ids = await self._frontend.encode(
                request.text, add_special=add_special, parse_special=request.parse_special
            )
        return pb.TokenizeResponse(token_ids=ids)

    @guarded
    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Token ids to text."""
        seen = ViolationCollector()
        size = self._frontend.info.vocab_size
        seen.check(max(request.token_ids, default=0) < size, "token_ids", f"ids must lie in [0, {size})")
        seen.raise_if_any()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._frontend.decode(list(request.token_ids), skip_special=skip)
        return pb.DetokenizeResponse(text=text)

    def _admit(self, request: Request, scheduling: options.SchedulingOptions, context: Context) -> Ticket:
        """Let the request in, with what is left of the call's time.

        Raises:
            RequestError: nothing is left, the caller may not, or the engine does not take it.
        """
        remaining = context.time_remaining()
        if remaining is not None:
            if remaining <= 0:
                raise DeadlinePassedError
            request = dataclasses.replace(request, deadline_s=remaining)
        return self._admission.admit(current_caller(), request, supersedes_key=scheduling.supersedes_key)


def _stream_message(event: RequestEvent, model: str) -> pb.GenerateStreamResponse:
    if isinstance(event, Delta):
        return pb.GenerateStreamResponse(delta=delta_message(event))
    if isinstance(event, Started):
        return pb.GenerateStreamResponse(started=started_message(event, model, current_arm()))
    assert isinstance(event, Finished)  # the stream raises what Failed says
    _check_deadline(event)
    return pb.GenerateStreamResponse(finished=finished_message(event))


def _check_deadline(event: Finished) -> None:
    if event.reason == FinishReason.DEADLINE:
        raise DeadlinePassedError
