"""GenerationService, ModelService, and health checks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

from grpc_health.v1 import health, health_pb2

from server.auth.principal import current_caller
from server.engine_client import DEFAULT_TRACE_STEPS, MAX_TRACE_STEPS, TRACE_LIMIT_RULE
from server.grpc.errors import Context
from server.grpc.messages import (
    event_message,
    info_message,
    load_message,
    sample_message,
    timings_message,
)
from server.grpc.request_reader import (
    PromptMessage,
    admit,
    holds_headers,
    parse_generate,
    parse_prefill,
    read_chat,
)
from server.hold_headers import from_first_token
from server.json_body import write_json
from server.served_model import Models, ServedModel, Task
from specdec.api.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc
from specdec.core.types import Delta, Finished, Started, trace_dict
from specdec.errors import InvalidRequestError, ViolationCollector


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Every generating call runs inside its stream's ``async with``, which ends the request in the engine if the client
    cancels, the deadline passes or an error is raised."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> generation_pb2.GenerateResponse:
        model = self._find(request)
        with model.gate.enter():
            asked = await parse_generate(request, model)
            response = generation_pb2.GenerateResponse(request_id=asked.request_id, model=model.name)
            deltas: dict[int, list[Delta]] = defaultdict(list)
            samples: list[generation_pb2.Sample] = []
            async with admit(model, asked, request.scheduling, context) as stream:
                async for event in stream:
                    if isinstance(event, Started):
                        response.seed = event.seed
                    elif isinstance(event, Delta):
                        deltas[event.index].append(event)
                    elif isinstance(event, Finished):
                        samples.append(sample_message(deltas[event.index], event))
            response.samples.extend(sorted(samples, key=lambda sample: sample.index))
            return response

    async def GenerateStream(self, request: generation_pb2.GenerateStreamRequest, context: Context) -> None:  # type: ignore[override]
        model = self._find(request)
        with model.gate.enter():
            asked = await parse_generate(request, model)
            name, hold = model.name, holds_headers(model, context)
            async with admit(model, asked, request.scheduling, context) as stream:
                async for event in from_first_token(stream, hold):
                    await context.write(event_message(generation_pb2.GenerateStreamResponse, event, name))

    async def Prefill(self, request: generation_pb2.PrefillRequest, context: Context) -> generation_pb2.PrefillResponse:
        model = self._find(request)
        with model.gate.enter():
            asked = await parse_prefill(request, model)
            response = generation_pb2.PrefillResponse(request_id=asked.request_id)
            async with admit(model, asked, request.scheduling, context) as stream:
                async for event in stream:
                    if isinstance(event, Finished):
                        response.prompt_tokens = event.usage.prompt_tokens
                        response.cached_tokens = event.usage.cached_tokens
                        response.timings.CopyFrom(timings_message(event.timings))
            return response

    async def Abort(self, request: generation_pb2.AbortRequest, context: Context) -> generation_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequestError.of("request_id", "must not be empty")
        aborted = [model.admission.abort(current_caller(), request.request_id) for model in self._models]
        return generation_pb2.AbortResponse(aborted=any(aborted))

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        which = request.WhichOneof("input")
        if which is None:
            raise InvalidRequestError.of("input", "one of text and chat is needed")
        model = self._models.named(request.model)
        if which == "chat":
            violations = ViolationCollector()
            ids = await read_chat(request.chat, model, violations)
            violations.raise_if_any()
        else:
            add_special = request.add_special if request.HasField("add_special") else True
            ids = await model.tokenizer.encode(
                request.text, add_special=add_special, parse_special=request.parse_special
            )
        return generation_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        model = self._models.named(request.model)
        size = model.info.vocab_size
        if max(request.token_ids, default=0) >= size:
            raise InvalidRequestError.of("token_ids", f"ids must lie in [0, {size})")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await model.tokenizer.decode(list(request.token_ids), skip_special=skip)
        return generation_pb2.DetokenizeResponse(text=text)

    def _find(self, message: PromptMessage) -> ServedModel:
        task = _TASKS.get(message.WhichOneof("prompt") or "", Task.ANY)
        return self._models.find(message.model, task)


_TASKS = {"fim": Task.FILL, "chat": Task.CHAT}


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from the engine process's last heartbeat, without waiting for it."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: Context
    ) -> model_pb2.GetServerInfoResponse:
        model = self._models.named(request.model)
        return info_message(model.info, model.client.engine.restarts)

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        models: list[model_pb2.Model] = []
        for model in self._models:
            target = model_pb2.Model(name=model.name, role=model_pb2.MODEL_ROLE_TARGET)
            target.aliases.extend(model.names.aliases)
            models.append(target)
            if model.client.engine.is_known and (draft := model.info.draft) is not None:
                models.append(model_pb2.Model(name=draft, role=model_pb2.MODEL_ROLE_DRAFT))
        return model_pb2.ListModelsResponse(models=models)

    async def GetLoad(self, request: model_pb2.GetLoadRequest, context: Context) -> model_pb2.GetLoadResponse:
        return load_message(self._models.named(request.model).client.engine.load)

    async def GetTrace(self, request: model_pb2.GetTraceRequest, context: Context) -> model_pb2.GetTraceResponse:
        """Asks the engine process, also while the server drains."""
        limit = request.limit if request.HasField("limit") else DEFAULT_TRACE_STEPS
        if not 1 <= limit <= MAX_TRACE_STEPS:
            raise InvalidRequestError.of("limit", f"{TRACE_LIMIT_RULE}, got {limit}")
        steps = await self._models.named(request.model).client.trace(limit)
        return model_pb2.GetTraceResponse(steps_json=[write_json(trace_dict(step)).decode() for step in steps])


class HealthServicer(health.aio.HealthServicer):
    """gRPC's own, but what it writes to a watcher waits in a queue: it writes while it holds a lock, so that a watcher
    that receives nothing would stop the other watchers and every report."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        statuses: asyncio.Queue[health_pb2.HealthCheckResponse] = asyncio.Queue()
        watching = asyncio.create_task(super().Watch(request, SimpleNamespace(write=statuses.put)))
        try:
            while True:
                await context.write(await statuses.get())
        finally:
            watching.cancel()
