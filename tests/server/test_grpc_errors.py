"""Refusals name every bad field, leak nothing and stay short; `test_status_table` has each condition's status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from server.grpc.errors import rich_status
from server.grpc.request_reader import read_chat
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2
from specdec.errors import FieldViolation, InvalidRequestError, RequestError, ViolationCollector
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import refused, rich, running_server, stream_request


def bad_fields(error: grpc.aio.AioRpcError) -> set[str]:
    return {v.field for v in rich(error)[BadRequest].field_violations}


async def test_all_bad_fields_are_named_together() -> None:
    request = stream_request(
        "hello",
        sampling=options_pb2.SamplingOptions(
            temperature=math.nan, top_p=1.5, min_p=-0.5, repetition_penalty=math.inf, presence_penalty=1e9,
            frequency_penalty=-math.inf, logit_bias={999: 1.0}, allowed_token_ids=[256],
        ),
        stopping=options_pb2.StoppingOptions(max_tokens=2, min_tokens=3, stop=["ok", ""], stop_token_ids=[300]),
        output=options_pb2.OutputOptions(logprobs=21),
        speculation=options_pb2.SpeculationOptions(
            mode=99, drafters=["nobody"], max_nodes=64, max_depth=64, width=17  # type: ignore[arg-type]
        ),
        request_id="r" * 129,
    )  # fmt: skip
    request.sampling.n = 17
    async with running_server() as server:
        error = await refused(server.generation.GenerateStream(request))
        ok = [m async for m in server.generation.GenerateStream(stream_request("hello"))]
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert bad_fields(error) == {
        "sampling.temperature", "sampling.top_p", "sampling.min_p", "sampling.repetition_penalty",
        "sampling.presence_penalty", "sampling.frequency_penalty", "sampling.logit_bias",
        "sampling.allowed_token_ids", "sampling.n", "stopping.min_tokens", "stopping.stop",
        "stopping.stop_token_ids", "output.logprobs", "speculation.mode", "speculation.drafters",
        "speculation.max_nodes", "speculation.max_depth", "speculation.width", "request_id",
    }  # fmt: skip
    assert rich(error)[ErrorInfo].domain == "specdec"
    assert ok[-1].WhichOneof("event") == "finished"


async def test_bad_prompts_are_named() -> None:
    chat = options_pb2.ChatPrompt(messages=[options_pb2.ChatMessage(role="robot", content="x")])
    said = options_pb2.ChatMessage(role="user", content="x")
    odd = options_pb2.ChatPrompt(messages=[said], template_variables="[1]")
    nobody = options_pb2.ChatPrompt(messages=[options_pb2.ChatMessage(content="x")])
    cases = [
        ("prompt", pb.GenerateRequest()),
        ("prompt.token_ids", pb.GenerateRequest(token_ids=options_pb2.TokenIds(ids=[1, 256]))),
        ("chat.messages[0].role", pb.GenerateRequest(chat=chat)),
        ("chat.messages", pb.GenerateRequest(chat=options_pb2.ChatPrompt())),
        ("chat.messages[0].role", pb.GenerateRequest(chat=nobody)),
        ("chat.template_variables", pb.GenerateRequest(chat=odd)),
    ]
    async with running_server() as server:
        for field, request in cases:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await server.generation.Generate(request)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert bad_fields(caught.value) == {field}
        for call in (
            server.generation.Tokenize(pb.TokenizeRequest()),
            server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[256])),
            server.generation.Abort(pb.AbortRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert bad_fields(caught.value) <= {"input", "token_ids", "request_id"}


async def test_a_fault_of_a_conversation_as_a_whole_names_the_conversation() -> None:
    async def refuse(*_: Any, **__: Any) -> list[int]:
        raise InvalidRequestError.of("prompt", "takes too long to split")

    chat = options_pb2.ChatPrompt(messages=[options_pb2.ChatMessage(role="user", content="x")])
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(encode_chat=refuse))
    violations = ViolationCollector()
    assert await read_chat(chat, model, violations) == []
    assert [each.field for each in violations.found] == ["chat"]


async def test_a_too_long_prompt_reports_limit_and_length() -> None:
    async with running_server() as server:
        by_front_end = await refused(server.generation.GenerateStream(stream_request("x" * 200)))
        by_engine = await refused(server.generation.GenerateStream(stream_request(salt="long")))
        of_ids = pb.GenerateStreamRequest(token_ids=options_pb2.TokenIds(ids=[1] * 201))
        by_ids = await refused(server.generation.GenerateStream(of_ids))
        both = []
        for asked in (stream_request("x" * 200), of_ids):
            asked.sampling.temperature = -1
            both.append(bad_fields(await refused(server.generation.GenerateStream(asked))))
    for error, limit, got in ((by_front_end, "127", "201"), (by_ids, "127", "201"), (by_engine, "11", "12")):
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        info = rich(error)[ErrorInfo]
        assert (info.reason, info.metadata["limit"], info.metadata["got"]) == ("CONTEXT_LENGTH_EXCEEDED", limit, got)
    assert both == [{"sampling.temperature"}] * 2


async def test_engine_errors_are_internal_and_leak_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(FakeTokenizer):
        def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
            if list(ids) == [1]:
                raise RuntimeError("a secret of the inside")
            return super().decode(ids, skip_special=skip_special)

    async with running_server(Faulty) as server:
        bug = await refused(server.generation.GenerateStream(stream_request(salt="bug")))
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await server.generation.Detokenize(pb.DetokenizeRequest(token_ids=[1]))
    assert {e.code() for e in (bug, fault.value)} == {grpc.StatusCode.INTERNAL}
    assert all("secret" not in str(e.details()) for e in (bug, fault.value))
    (record,) = [record for record in caplog.records if "/Detokenize, request" in record.message]
    assert record.exc_info is not None
    assert "a secret of the inside" in str(record.exc_info[1])  # that of the engine: `test_serving`


def test_details_stay_within_the_limits_of_clients() -> None:
    violations = [FieldViolation(f"speculation.field{i}", "\N{GRINNING FACE}" * 500) for i in range(20)]
    status = rich_status(InvalidRequestError(violations))
    assert len(status.SerializeToString()) < 6000
    assert len(status.message.encode()) < 1010


def every_refusal(kind: type[RequestError] = RequestError) -> list[type[RequestError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in every_refusal(child))]


@pytest.mark.parametrize("kind", every_refusal(), ids=lambda kind: kind.__name__)
def test_every_rejection_has_consistent_statuses(kind: type[RequestError]) -> None:
    code = grpc.StatusCode[kind.grpc_code]
    assert 400 <= kind.http_status <= 503
    unavailable = code == grpc.StatusCode.UNAVAILABLE
    retryable = kind.retry_after_s is not None
    assert unavailable == (kind.http_status == 503) == (retryable or kind.engines_stopped > 0)
