"""The client: one method per call of the generation, completion, model, experiment and admin services."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Literal, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    completion_pb2,
    completion_pb2_grpc,
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from specdec.client.connection import CallError, Connection, Credentials, Method, RetryPolicy, errors_of
from specdec.client.messages import (
    completion_message,
    fill_prompt,
    fill_request,
    generated_of,
    info_of,
    record_of,
)
from specdec.client.prompt import ChatTurn, CompletionHints, Fim, Generated, GenerateOptions, Prompt
from specdec.client.resuming import ResumableStream
from specdec.core.types import EngineInfo, RequestEvent, ServerLoad, StepTrace, Usage, trace_step

# The services, by the channel that a call goes through.
_Completion = completion_pb2_grpc.CompletionServiceStub
_Experiments = experiment_pb2_grpc.ExperimentServiceStub
_Admin = admin_pb2_grpc.AdminServiceStub
_Generation = generation_pb2_grpc.GenerationServiceStub
_Models = model_pb2_grpc.ModelServiceStub
_Health = health_pb2_grpc.HealthStub


class SessionCall:
    """A stream of CompletionService.CompleteSession. Use as ``async with``: leaving the block ends the generation.

    It is never repeated: after a failure, send the setup and the documents on a new one."""

    def __init__(self, call: Any, address: str) -> None:
        self._call, self._address = call, address

    async def __aenter__(self) -> SessionCall:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()

    async def send(self, message: completion_pb2.CompleteSessionRequest) -> None:
        """Send one message.

        Raises:
            CallError: the stream has ended.
        """
        try:
            with errors_of(self._address):
                await self._call.write(message)
        except asyncio.InvalidStateError:  # of gRPC, where the stream had ended before
            if not self._call.done():
                raise  # `done` was called
            raise await self._why_ended() from None

    async def _why_ended(self) -> CallError:
        """The error of a stream that has ended."""
        code, details = await self._call.code(), await self._call.details()
        if code == grpc.StatusCode.OK:
            return CallError(grpc.StatusCode.CANCELLED, "the server has ended the stream", address=self._address)
        trailers = await self._call.trailing_metadata() or grpc.aio.Metadata()
        return CallError.of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details), self._address)

    async def done(self) -> None:
        """End sending; pending requests are still answered."""
        await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[completion_pb2.CompleteSessionResponse]:
        """The server's messages, until it ends the stream.

        Raises:
            CallError: it ends with an error.
        """
        with errors_of(self._address):
            async for message in self._call:
                yield message


Outcome = Literal["shown", "accepted", "partially_accepted", "rejected"]
_AS_CONFIGURED = CompletionHints()


class CompletionClient:
    """Code completion. Every method raises `CallError`. Created by `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def complete(
        self, gap: Fim, hints: CompletionHints = _AS_CONFIGURED, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestEvent, None]:
        """The text for ``gap`` as events, like `Client.stream`. Defaults: greedy, at most 128 tokens."""
        options["request_id"] = options.get("request_id") or uuid.uuid4().hex
        return self.stream(completion_message(gap, hints, options), options.get("timeout_s"))

    def stream(
        self, message: completion_pb2.CompleteRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[RequestEvent, None]:
        """The events of ``message``, which must name its request. timeout_s: the call's deadline, over all tries."""
        return ResumableStream(self._connection, lambda at: _Completion(at).Complete, message, timeout_s).events()

    def session(self) -> SessionCall:
        """A stream for one editor; its first message must be a setup."""
        call = self._connection.both_ways(lambda at: _Completion(at).CompleteSession)
        return SessionCall(call, self._connection.address)

    def predict_edit(
        self, message: completion_pb2.PredictEditRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[completion_pb2.PredictEditResponse, None]:
        """The answer to ``message``: Started, edits, Finished. Close the generator to cancel the call."""
        return self._connection.stream(lambda at: _Completion(at).PredictEdit, message, timeout_s)

    async def report_outcome(self, suggestion_id: str, outcome: Outcome, *, cache_salt: str = "") -> bool:
        """Report the outcome of a suggestion (of `complete`: its request id). Returns False if it is unknown."""
        value = completion_pb2.Outcome.Value(f"OUTCOME_{outcome.upper()}")
        request = completion_pb2.ReportOutcomeRequest(suggestion_id=suggestion_id, outcome=value)
        request.cache.salt = cache_salt
        return bool((await self._connection.unary(lambda at: _Completion(at).ReportOutcome, request)).known)


class ExperimentClient:
    """Experiments; needs a key marked `admin`. Every method raises `CallError`. Created by `Client`. ``model``: one of
    several; empty: the first."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def start(self, plan: str, *, model: str = "") -> experiment_pb2.Experiment:
        """Start or resume the experiment that ``plan`` describes, in YAML or JSON."""
        request = experiment_pb2.StartExperimentRequest(plan=plan, model=model)
        return await self._one(lambda at: _Experiments(at).StartExperiment, request)

    async def stop(self, name: str, *, model: str = "") -> experiment_pb2.Experiment:
        """Stop an experiment; its records stay."""
        request = experiment_pb2.StopExperimentRequest(name=name, model=model)
        return await self._one(lambda at: _Experiments(at).StopExperiment, request)

    async def get(self, name: str, *, model: str = "") -> experiment_pb2.Experiment:
        """An experiment's status."""
        request = experiment_pb2.GetExperimentRequest(name=name, model=model)
        return await self._one(lambda at: _Experiments(at).GetExperiment, request)

    async def _one(self, method: Method, request: Any) -> experiment_pb2.Experiment:
        found: experiment_pb2.Experiment = (await self._connection.unary(method, request)).experiment
        return found

    async def every(self, *, model: str = "") -> list[experiment_pb2.Experiment]:
        """All experiments with records, by name."""
        request = experiment_pb2.ListExperimentsRequest(model=model)
        response = await self._connection.unary(lambda at: _Experiments(at).ListExperiments, request)
        return [*response.experiments]

    async def result(
        self, name: str, *, report: bool = False, model: str = ""
    ) -> experiment_pb2.GetExperimentResultResponse:
        """The result of an experiment's records so far. report: include the HTML report."""
        request = experiment_pb2.GetExperimentResultRequest(name=name, report=report, model=model)
        found: experiment_pb2.GetExperimentResultResponse = await self._connection.unary(
            lambda at: _Experiments(at).GetExperimentResult, request
        )
        return found


class AdminClient:
    """Operators' commands; needs a key marked `admin`. Every method raises `CallError`. Created by `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def drain(self, timeout_s: float | None = None, *, model: str = "") -> int:
        """Refuse new requests and wait until running ones have ended; returns how many still run.

        timeout_s: longest wait; None: the server's ``drain_s``. model: only this one; empty: all.
        """
        request = admin_pb2.DrainRequest(timeout_s=timeout_s, model=model)
        response = await self._connection.unary(lambda at: _Admin(at).Drain, request)
        return int(response.running)

    async def flush_cache(self, *, model: str = "") -> int:
        """Drop the cached prefixes that no running request uses; returns the number of pages freed."""
        request = admin_pb2.FlushCacheRequest(model=model)
        return int((await self._connection.unary(lambda at: _Admin(at).FlushCache, request)).pages)

    async def swap_draft(
        self, draft: str = "", dtype: str = "", *, model: str = ""
    ) -> tuple[str | None, tuple[str, ...]]:
        """Replace the draft model, or drop it (empty); returns its name and the loaded drafters."""
        request = admin_pb2.SwapDraftRequest(draft=draft, dtype=dtype, model=model)
        response = await self._connection.unary(lambda at: _Admin(at).SwapDraft, request)
        return (response.draft if response.HasField("draft") else None), tuple(response.drafters)


_IN_THE_CLEAR = Credentials()
_PATIENT = RetryPolicy()


class Client:
    """A client of one server, or of several equal ones. Use as ``async with``, in one event loop.

    Every method raises `CallError`. Calls that the server refuses for now are repeated by the retry policy, within
    their timeout. ``model``: the name of one of several models; empty: chosen by the server.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials = _IN_THE_CLEAR,
        retry: RetryPolicy = _PATIENT,
        *,
        workspace: str = "",
    ) -> None:
        """address: ``host:port``, or several separated by commas. workspace: a proxy sends all calls with the same
        value to one server, whose prefix cache and suggestions they share; empty: all calls of a session.

        Raises:
            ConfigError: an address is empty, or a file of the credentials cannot be read.
        """
        self._connection = Connection([one.strip() for one in address.split(",")], credentials, retry, workspace)
        self.admin = AdminClient(self._connection)
        self.completion = CompletionClient(self._connection)
        self.experiments = ExperimentClient(self._connection)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call; those under way and later ones raise `CallError`."""
        await self._connection.close()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[RequestEvent, None]:
        """The events of an answer: Started, Deltas, one Finished per sample. Closing the generator
        (`contextlib.aclosing`) cancels the call and aborts the request.

        If the server or the connection fails, the stream resumes at the same token on the next server that answers and
        has the same numeric fingerprint (`ResumableStream`).
        """
        options["request_id"] = options.get("request_id") or uuid.uuid4().hex
        message = fill_request(generation_pb2.GenerateStreamRequest(), prompt, options)
        return ResumableStream(
            self._connection, lambda at: _Generation(at).GenerateStream, message, options.get("timeout_s")
        ).events()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generated:
        """The complete answer."""
        message = fill_request(generation_pb2.GenerateRequest(), prompt, options)
        timeout_s = options.get("timeout_s")
        return generated_of(await self._connection.unary(lambda at: _Generation(at).Generate, message, timeout_s))

    async def prefill(
        self,
        prompt: Prompt,
        *,
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        model: str = "",
    ) -> Usage:
        """Compute a prompt into the prefix cache without generating; returns its length and its cached tokens."""
        message = generation_pb2.PrefillRequest(model=model)
        fill_prompt(message, prompt)
        message.cache.salt, message.scheduling.priority = cache_salt, priority
        response = await self._connection.unary(lambda at: _Generation(at).Prefill, message, timeout_s)
        return Usage(response.prompt_tokens, response.cached_tokens)

    async def abort(self, request_id: str) -> bool:
        """Abort a request, which ends with the tokens it has. Returns False if no request has the id."""
        request = generation_pb2.AbortRequest(request_id=request_id)
        return bool((await self._connection.unary(lambda at: _Generation(at).Abort, request)).aborted)

    async def tokenize(
        self, text: str | Sequence[ChatTurn], *, add_special: bool = True, parse_special: bool = False, model: str = ""
    ) -> list[int]:
        """Token ids of a text or a conversation. add_special: with the model's begin token, if it has one.
        parse_special: encode the names of special tokens as these tokens."""
        request = generation_pb2.TokenizeRequest(add_special=add_special, parse_special=parse_special, model=model)
        fill_prompt(request, text)
        return list((await self._connection.unary(lambda at: _Generation(at).Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        """Text of token ids."""
        request = generation_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens, model=model
        )
        return str((await self._connection.unary(lambda at: _Generation(at).Detokenize, request)).text)

    async def info(self, timeout_s: float | None = None, *, model: str = "") -> EngineInfo:
        """The engine's description."""
        request = model_pb2.GetServerInfoRequest(model=model)
        return info_of(await self._connection.unary(lambda at: _Models(at).GetServerInfo, request, timeout_s))

    async def readiness(self, timeout_s: float | None = None) -> dict[str, bool]:
        """The names of the served models, and whether each takes requests."""
        request = model_pb2.ListModelsRequest()
        answer = await self._connection.unary(lambda at: _Models(at).ListModels, request, timeout_s)
        names = [model.name for model in answer.models if model.role == model_pb2.MODEL_ROLE_TARGET]
        found = {}
        for name in names:
            check = health_pb2.HealthCheckRequest(service=name if len(names) > 1 else "")
            health = await self._connection.unary(lambda at: _Health(at).Check, check, timeout_s)
            found[name] = health.status == health_pb2.HealthCheckResponse.SERVING
        return found

    async def load(self, *, model: str = "") -> ServerLoad:
        """The engine's load."""
        request = model_pb2.GetLoadRequest(model=model)
        return record_of(ServerLoad, await self._connection.unary(lambda at: _Models(at).GetLoad, request))

    async def trace(self, limit: int, timeout_s: float | None = None, *, model: str = "") -> list[StepTrace]:
        """The engine's last ``limit`` steps, newest last."""
        request = model_pb2.GetTraceRequest(limit=limit, model=model)
        response = await self._connection.unary(lambda at: _Models(at).GetTrace, request, timeout_s)
        return [trace_step(json.loads(step)) for step in response.steps_json]
