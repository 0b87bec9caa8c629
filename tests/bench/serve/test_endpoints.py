"""What endpoints record of real answers and of failing servers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from bench.serve.endpoints import EndpointError, GrpcEndpoint, OpenAIEndpoint, connect
from bench.serve.load import ServePlan, report_tables, run_plan
from specdec.cli.main import cli
from specdec.client.connection import Credentials
from specdec.client.prompt import ChatTurn
from specdec.errors import ConfigError, EngineDeadError, SpecdecError
from specdec.load.request import LoadRequest, Record, RefusedError
from tests.client.test_resuming import REST, Script, delta, started, talking
from tests.fake_engine import CHAT as CHAT_MODEL
from tests.fake_engine import CODER
from tests.server.auth.certificates import Certificates
from tests.server.harness import running_server
from tests.server.several_models import several

TEXT = LoadRequest("t", 6, text="hello world")
CHAT = LoadRequest("c", 5, chat=(ChatTurn("user", "hello"),))


@pytest.mark.parametrize("face", ["grpc", "http"])
async def test_a_real_answer(face: str) -> None:
    async with running_server(http_port=0) as server:
        found = server.addresses
        url = f"grpc://127.0.0.1:{found.grpc_port}" if face == "grpc" else f"http://127.0.0.1:{found.http_port}/v1"
        endpoint, about = await connect(url, Credentials())
        for ask in (TEXT, CHAT):
            record = Record(ask.name, 0.0)
            await endpoint.send(ask, record)
            assert record.output_tokens == ask.max_tokens
            assert len(record.chunk_s) == ask.max_tokens  # the fake engine gives a token a step
            assert record.chunk_s == sorted(record.chunk_s)
            assert record.chunk_tokens == ([1] * ask.max_tokens if face == "grpc" else [])
        await endpoint.close()
    assert "fake" in json.dumps(about)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (None, "refused", r"/v1/models does not answer \(ConnectError: refused\); check the URL"),
        (None, "[SSL: CERTIFICATE_VERIFY_FAILED]", r"does not answer .*; give its authority's file \(--ca\)"),
        (401, "", r"refuses the key \(HTTP 401\); give one with --key-file"),
        (403, "", r"refuses the key \(HTTP 403\); give one with --key-file"),
        (404, "", r"answers with HTTP 404; check the URL, or give a model with --model"),
        (200, '{"data": []}', "names no model; give one with --model"),
        (200, "<html>", "names no model; give one with --model"),
    ],
)
async def test_bug_a_server_without_a_list_of_models_says_why(status: int | None, body: str, message: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError(body, request=request)
        return httpx.Response(status, text=body)

    for model in ("", "given"):
        endpoint = OpenAIEndpoint("http://test/v1", model=model, transport=httpx.MockTransport(answer))
        if model:
            assert await endpoint.find_model() == model
        else:
            with pytest.raises(EndpointError, match=message):
                await endpoint.find_model()
        await endpoint.close()


async def test_bug_over_grpc_the_first_of_several_models_was_measured_whichever_was_named() -> None:
    answers = {}
    with several() as server:
        for model, target in (("", CHAT_MODEL), ("fim", CODER)):
            endpoint, about = await connect(f"grpc://127.0.0.1:{server.grpc_port}", Credentials(), model=model)
            assert about["server"]["target"] == target
            record = Record("t", 0.0)
            await endpoint.send(TEXT, record)
            answers[model] = record.text
            await endpoint.close()
    assert answers[""] != answers["fim"] != ""


async def test_a_server_that_drains_refuses_with_a_hint() -> None:
    async with running_server() as server:
        endpoint, _ = await connect(f"grpc://127.0.0.1:{server.addresses.grpc_port}", Credentials())
        await server.serving.models.first.gate.drain(0)
        with pytest.raises(RefusedError) as caught:
            await endpoint.send(TEXT, Record("t", 0.0))
        assert caught.value.retry_after_s is not None
        await endpoint.close()


async def test_a_server_that_is_gone_did_not_refuse() -> None:
    async with running_server() as server:
        endpoint, _ = await connect(f"grpc://127.0.0.1:{server.addresses.grpc_port}", Credentials())
    with pytest.raises(SpecdecError) as caught:
        await endpoint.send(TEXT, Record("t", 0.0))
    assert not isinstance(caught.value, RefusedError)
    await endpoint.close()


@pytest.mark.parametrize("sent", [[], [delta("ab", 1, 2)]])
async def test_bug_an_answer_that_broke_off_is_not_resumed(sent: list[Any]) -> None:
    script = Script([started(), *sent, EngineDeadError()], REST)
    async with talking(script) as client:
        endpoint = GrpcEndpoint(client._connection.address, Credentials())
        with pytest.raises(SpecdecError, match="the engine process stopped") as caught:
            await endpoint.send(TEXT, Record("t", 0.0))
        await endpoint.close()
    assert not isinstance(caught.value, RefusedError)
    assert len(script.asked) == 1


async def test_texts_and_tokens_that_end_the_answer_are_sent() -> None:
    script = Script(REST)
    async with talking(script) as client:
        endpoint = GrpcEndpoint(client._connection.address, Credentials())
        await endpoint.send(LoadRequest("t", 6, text="a", stop=("b",), stop_ids=(7,)), Record("t", 0.0))
        await endpoint.close()
    (asked,) = script.asked
    assert (list(asked.stopping.stop), list(asked.stopping.stop_token_ids)) == (["b"], [7])


async def test_a_server_with_an_authority_of_its_own(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(files.cert, files.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{"data":[{"id": "m"}]}')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        shown = Credentials(tls=True, ca=files.ca, cert=files.client, cert_key=files.client)
        endpoint, about = await connect(url, shown)
        await endpoint.close()
    assert about["model"] == "m"
    with pytest.raises(ConfigError, match=r"nothing\.pem cannot be read \(No such file"):
        await connect(url, Credentials(tls=True, ca=tmp_path / "nothing.pem"))
    with pytest.raises(ConfigError, match="must be PEM files"):
        await connect(url, Credentials(tls=True, cert=files.client, cert_key=files.key))


@pytest.mark.parametrize("option", ["--tls", "--ca", "--cert"])
def test_tls_is_not_left_out_without_a_word(option: str, tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    given = {
        "--tls": ("--tls",),
        "--ca": ("--ca", str(files.ca)),
        "--cert": ("--cert", str(files.client), "--cert-key", str(files.client)),
    }
    result = CliRunner().invoke(cli, ["bench", "serve", "--url", "http://127.0.0.1:1", *given[option]])
    assert result.exit_code == 1
    assert f"{option}: an http:// URL is not encrypted; write https://, or leave {option} out" in result.stderr


@pytest.mark.parametrize("url", ["localhost:1", "ftp://x/v1", "grpc://", "grpc://h:1/v1", "http:///v1"])
async def test_urls_that_mean_nothing(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        await connect(url, Credentials())


def answering(answer: Callable[[httpx.Request], httpx.Response]) -> OpenAIEndpoint:
    return OpenAIEndpoint("http://test/v1", model="m", key="k", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("status", "headers", "hint"),
    [
        (429, {"retry-after": "1.5"}, 1.5),
        (503, {}, None),
        (503, {"retry-after": "-5"}, 0.0),
        (503, {"retry-after": "nan"}, None),
        (503, {"retry-after": "1e400"}, None),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
async def test_http_refusals(status: int, headers: dict[str, str], hint: float | None) -> None:
    with pytest.raises(RefusedError) as caught:
        await answering(lambda request: httpx.Response(status, headers=headers)).send(TEXT, Record("t", 0.0))
    assert caught.value.retry_after_s == hint


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(400, text="no"), httpx.Response(200, text="data: {oops\n\n"),
        httpx.Response(200, text='data: {"error":{"message":"x"}}\n\n'),
        httpx.Response(200, text="data: 5\n\n"), httpx.Response(200, text='data: {"choices": [5]}\n\n'),
        httpx.Response(200, text='data: {"usage": {"completion_tokens": "x"}}\n\n'),
        httpx.Response(200, text='data: {"choices": [{"text": "cut"}]}\n\n'),
    ],
)  # fmt: skip
async def test_http_failures(response: httpx.Response) -> None:
    with pytest.raises(EndpointError):
        await answering(lambda request: response).send(TEXT, Record("t", 0.0))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_only_line_breaks_of_the_protocol_end_a_line(end: str) -> None:
    said = "a\u2028b\u2029c\x85d"
    event = json.dumps({"choices": [{"index": 0, "text": said}]}, ensure_ascii=False)
    record = Record("t", 0.0)
    await answering(lambda request: httpx.Response(200, text=f"data: {event}{end}{end}data: [DONE]{end}{end}")).send(
        TEXT, record
    )
    assert record.text == said


async def test_a_finish_reason_ends_an_answer_without_done() -> None:
    event = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
    record = Record("t", 0.0)
    await answering(lambda request: httpx.Response(200, text=f"data: {json.dumps(event)}\n\n")).send(TEXT, record)
    assert record.text == "a"


async def test_bug_as_many_connections_as_the_system_allows() -> None:
    """Else requests beyond the usual limit of 1,024 open files fail, and count against the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        endpoint, _ = await connect("http://127.0.0.1:1/v1", Credentials(), model="m")
        await endpoint.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] not in range(513)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_is_sent_and_what_counts_as_text() -> None:
    """Chunks without text do not count as first token."""
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["authorization"], request.url.path, json.loads(request.content)))
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "a"}]
        deltas += [{"reasoning": "b", "reasoning_content": "b"}, {"reasoning": "c"}, {"content": "d"}, {}]
        so_far = {"prompt_tokens": 3, "completion_tokens": None}
        lines = [{"choices": [{"index": 0, "delta": delta}], "usage": so_far} for delta in deltas]
        lines.append(
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": None}}
        )
        return httpx.Response(200, text="".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n")

    record = Record("c", 0.0)
    await answering(answer).send(CHAT, record)
    assert (record.text, len(record.chunk_s), record.prompt_tokens, record.output_tokens) == ("abcd", 4, 3, 4)
    assert record.chunk_s[-1] <= record.last_s
    assert record.end_s == 0.0  # set by the sender of the request
    key, path, body = seen[0]
    assert (key, path, body["messages"]) == ("Bearer k", "/v1/chat/completions", [{"role": "user", "content": "hello"}])
    assert body["max_tokens"] == 5
    assert "ignore_eos" not in body
    await answering(answer).send(CHAT.of_fixed_length(), record)
    assert seen[1][2]["ignore_eos"] is True
    for prediction, sent in (("b", {"type": "content", "content": "b"}), ((5, 7), None)):
        await answering(answer).send(dataclasses.replace(CHAT, prediction=prediction), record)
        assert seen[-1][2].get("prediction") == sent  # tokens have no place in a body
    assert body["stream_options"] == {"include_usage": True}


async def test_a_whole_run_and_its_reports() -> None:
    async with running_server() as server:
        endpoint, about = await connect(f"grpc://127.0.0.1:{server.addresses.grpc_port}", Credentials())
        plan = ServePlan(workload="chat", at_once=3, requests=9, max_tokens=8, warm_up=2)
        looks: list[int] = []
        report = await run_plan(
            plan, endpoint, about=about | {"note": "<&>"}, watch=lambda run: looks.append(len(run.records))
        )
        await endpoint.close()
    figures = json.loads(json.dumps(report.as_dict()))
    assert figures["requests"]["ok"] == 9
    assert looks
    assert len(list(report_tables(report))) == 2
