"""The client: one method per call, types of the engine in and out."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Unpack

from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, trace_pb2, trace_pb2_grpc
from specdec.client.admin_client import AdminClient
from specdec.client.chat_turn import ChatTurn
from specdec.client.completion_client import CompletionClient
from specdec.client.connection import Connection
from specdec.client.credentials import Credentials
from specdec.client.experiment_client import ExperimentClient
from specdec.client.generate_options import GenerateOptions
from specdec.client.generated import Generated
from specdec.client.prompt import Prompt
from specdec.client.requests import chat_message, fill_prompt, fill_request
from specdec.client.results import event_of, generated_of, info_of, load_of, step_of
from specdec.client.retry_policy import RetryPolicy
from specdec.types import EngineInfo, EngineLoad, RequestEvent, StepTrace, Usage

_IN_THE_CLEAR = Credentials()
_PATIENT = RetryPolicy()


class Client:
    """Talks to the server at ``address`` (``host:port``). Use as ``async with``, in one event loop.

    Every method raises `CallError` when the call fails. Calls that the server refuses for now are tried again as
    ``retry`` says, within their own timeout; a stream only until its first event.

    Raises:
        ConfigError: a file of the credentials can not be read.
    """

    def __init__(self, address: str, credentials: Credentials = _IN_THE_CLEAR, retry: RetryPolicy = _PATIENT) -> None:
        self._connection = Connection(address, credentials, retry)
        self.admin = AdminClient(self._connection)
        self.completion = CompletionClient(self._connection)
        self.experiments = ExperimentClient(self._connection)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every call."""
        await self._connection.close()

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[RequestEvent, None]:
        """The answer as it is made: one Started, Deltas, one Finished per sample. Closing it (`contextlib.aclosing`)
        cancels the call, and the engine forgets the request at once."""
        request_id = options["request_id"] = options.get("request_id") or uuid.uuid4().hex
        message = fill_request(pb.GenerateStreamRequest(), prompt, options)
        method = self._generation.GenerateStream
        async with aclosing(self._connection.stream(method, message, options.get("timeout_s"))) as responses:
            async for response in responses:
                event = event_of(response, request_id)
                if event is not None:
                    yield event

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generated:
        """The whole answer at once."""
        message = fill_request(pb.GenerateRequest(), prompt, options)
        return generated_of(await self._connection.unary(self._generation.Generate, message, options.get("timeout_s")))

    async def prefill(
        self, prompt: Prompt, *, cache_salt: str = "", priority: int = 0, timeout_s: float | None = None
    ) -> Usage:
        """Compute a prompt into the prefix cache, and no token; how long it is, and what of it was there before."""
        message = pb.PrefillRequest()
        fill_prompt(message, prompt)
        message.cache.salt, message.scheduling.priority = cache_salt, priority
        response = await self._connection.unary(self._generation.Prefill, message, timeout_s)
        return Usage(response.prompt_tokens, response.cached_tokens)

    async def abort(self, request_id: str) -> bool:
        """End a request in flight, which keeps what it has; False when there is none of this id."""
        response = await self._connection.unary(self._generation.Abort, pb.AbortRequest(request_id=request_id))
        return bool(response.aborted)

    async def tokenize(
        self, text: str | Sequence[ChatTurn], *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text or a conversation. add_special: with the model's begin token, where it has one.
        parse_special: read special tokens that are spelled out as such."""
        request = pb.TokenizeRequest(add_special=add_special, parse_special=parse_special)
        if isinstance(text, str):
            request.text = text
        else:
            request.chat.CopyFrom(chat_message(text))
        return list((await self._connection.unary(self._generation.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._connection.unary(self._generation.Detokenize, request)).text)

    async def info(self, timeout_s: float | None = None) -> EngineInfo:
        """What is served."""
        request = model_pb2.GetServerInfoRequest()
        return info_of(await self._connection.unary(self._models.GetServerInfo, request, timeout_s))

    async def load(self) -> EngineLoad:
        """How busy it is."""
        return load_of(await self._connection.unary(self._models.GetLoad, model_pb2.GetLoadRequest()))

    async def trace(self, limit: int, timeout_s: float | None = None) -> list[StepTrace]:
        """The engine's last ``limit`` steps, newest last."""
        stub = trace_pb2_grpc.TraceServiceStub(self._connection.channel)
        response = await self._connection.unary(stub.GetTrace, trace_pb2.GetTraceRequest(limit=limit), timeout_s)
        return [step_of(step) for step in response.steps]

    @property
    def _generation(self) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        return generation_pb2_grpc.GenerationServiceStub(self._connection.channel)

    @property
    def _models(self) -> model_pb2_grpc.ModelServiceAsyncStub:
        return model_pb2_grpc.ModelServiceStub(self._connection.channel)
