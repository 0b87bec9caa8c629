"""Bytes that are not a valid message are reported as the caller's error, and the next call is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import generation_pb2
from tests.server.harness import Harness, rich, running_server, stream_request

GENERATION, COMPLETION = "/specdec.api.v1.GenerationService/", "/specdec.api.v1.CompletionService/"
BAD_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string, of two bytes that are no UTF-8
BAD = (b"\xff\xff\xff", b"\x0a\x05a", BAD_UTF8)


async def ended(server: Harness, path: str, sent: list[bytes]) -> grpc.aio.AioRpcError:
    """How a call with these messages, as they are, ends."""

    async def messages() -> AsyncIterator[bytes]:
        for data in sent:
            yield data

    call: Any
    if path.endswith("Session"):
        call = server.channel.stream_stream(path)(messages())
    else:
        call = server.channel.unary_stream(path)(sent[0])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_an_unreadable_message_is_an_invalid_argument() -> None:
    setup = pb.CompleteSessionRequest(setup=pb.SessionSetup(completion={"mode": "MODE_PREFIX"})).SerializeToString()
    async with running_server() as server:
        for data in BAD:
            for path in (GENERATION + "Generate", GENERATION + "GenerateStream", COMPLETION + "Complete"):
                error = await ended(server, path, [data])
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, path
                assert rich(error)[ErrorInfo].reason == "INVALID_ARGUMENT"
                assert rich(error)[BadRequest].field_violations[0].field == "message"
            for sent in ([data], [setup, data]):
                error = await ended(server, COMPLETION + "CompleteSession", sent)
                assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        again = server.generation.GenerateStream(stream_request("hello"))
        assert [message async for message in again][-1].WhichOneof("event") == "finished"
        exporter = server.serving.models.exporter
        text, _ = exporter.render("")
        assert b'endpoint="v1.GenerationService/Generate",face="grpc",status="INVALID_ARGUMENT"} 3.0' in text


async def test_an_unknown_field_is_accepted() -> None:
    data = generation_pb2.TokenizeRequest(text="a").SerializeToString() + b"\xf8\x07\x01"  # field 127, a number
    async with running_server() as server:
        answer = await server.channel.unary_unary(GENERATION + "Tokenize")(data)
    assert list(generation_pb2.TokenizeResponse.FromString(answer).token_ids) == [2, 97]
