"""The log of calls: caller, method, duration and tokens, and never any text of a prompt or an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from specdec.api.v1 import generation_pb2 as pb
from tests.server.auth.key_files import make_key
from tests.server.harness import running_server, stream_request
from tests.server.http.harness import CHAT, COMPLETIONS, running
from tests.server.observe.logs.capture import logged

SECRET = "Xyzzy"  # the fake engine echoes it, so it is in the prompt and in the output


def test_a_call_is_one_line_with_its_figures() -> None:
    with logged() as lines, running() as server:
        usage = server.ask(prompt="hello", n=2)["usage"]
        server.client.post(COMPLETIONS, json={"prompt": "again"}, headers={"x-request-id": "mine"})
        assert server.comes_to(lambda: len(lines.of("call", endpoint=COMPLETIONS)) == 2)
        found = lines.of("call", endpoint=COMPLETIONS)
    first, second = found
    assert second["request_id"] == "mine"
    assert len(first["request_id"]) == 32
    expected = {
        "face": "http", "status": "200", "prompt_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"], "cached_tokens": 3, "queue_ms": 0.5, "finish": "length",
        "steps": 10, "drafted": 12, "accepted": 6, "acceptance": 0.5,
    }  # fmt: skip
    assert expected.items() <= first.items()
    assert 0 < first["ttft_ms"] <= first["duration_ms"]
    assert "left" not in first


def test_rejections_log_their_reason_and_disconnects_are_logged() -> None:
    with logged() as lines, running() as server:
        server.refused(prompt="x", temperature=-1)
        server.client.get("/no/such/path")
        body = {"prompt": "x" * 100, "stream": True, "cache_salt": "slow"}
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_lines())
        assert server.comes_to(lambda: bool(lines.of("call", left=True)))
    refused = lines.of("call", status="400")
    (missing,) = lines.of("call", status="404")
    (left,) = lines.of("call", left=True)
    assert [line["reason"] for line in refused] == ["INVALID_ARGUMENT"]
    assert "prompt_tokens" not in refused[0]
    assert (missing["endpoint"], missing["reason"]) == ("other", "PATH_NOT_FOUND")
    assert 0 < left["output_tokens"] < 100


def test_health_checks_are_not_logged() -> None:
    with logged() as lines, running() as server:
        for path in ("/readyz", "/v1/loads", "/livez", "/v1/models"):
            assert server.client.get(path).status_code == 200
        assert server.comes_to(lambda: bool(lines.of("call", endpoint="/v1/models")))
    assert [line["endpoint"] for line in lines.of("call")] == ["/v1/models"]


def test_every_http_answer_has_the_id_of_its_call() -> None:
    with running() as server:
        for path in ("/livez", "/v1/models", "/nowhere"):
            response = server.client.get(path, headers={"x-request-id": "mine"})
            assert response.headers.get_list("x-request-id") == ["mine"]
        first, second = (server.client.get("/livez").headers["x-request-id"] for _ in range(2))
        assert first != second
        response = server.client.post(COMPLETIONS, json={"prompt": "x"}, headers={"x-request-id": "mine"})
        assert response.headers.get_list("x-request-id") == ["mine"]


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_line_contains_a_prompt_or_an_answer(kind: str) -> None:
    with logged(kind) as lines, running() as server:  # type: ignore[arg-type]
        server.ask(prompt=f"say {SECRET}")
        server.stream(prompt=f"say {SECRET}", cache_salt=SECRET)
        server.ask(CHAT, messages=[{"role": "user", "content": SECRET}])
        server.refused(prompt=f"say {SECRET}" * 100)
        server.refused(CHAT, messages=[{"role": "user", "content": {"text": SECRET}}])
        server.refused(prompt="x", response_format={"type": SECRET})
        server.client.post(COMPLETIONS, content=b'{"prompt": "' + SECRET.encode())
        server.client.post(COMPLETIONS, json={"prompt": SECRET, "cache_salt": "bug"})
        server.client.post(COMPLETIONS, json={"prompt": SECRET, "cache_salt": "broken"})
        server.client.post(COMPLETIONS, json={"prompt": SECRET, "cache_salt": "die"})
    text = lines.text
    assert text.count("/v1/") >= 10
    assert SECRET not in text


def test_texts_are_logged_only_if_configured() -> None:
    with logged() as lines, running(log_texts=True) as server:
        server.ask(prompt=f"say {SECRET}")
    (line,) = lines.of("call", endpoint=COMPLETIONS)
    assert line["prompt"] == f"say {SECRET}"
    assert SECRET in line["output"]
    with logged() as lines, running(log_texts=True) as server:
        choices = server.ask(prompt=f"say {SECRET}", n=2, seed=1)["choices"]
    (line,) = lines.of("call", endpoint=COMPLETIONS)
    assert line["output"] == "\n".join(choice["text"] for choice in choices)
    with logged() as lines, running(log_calls=False) as server:
        server.ask(prompt="hello")
    assert not lines.of("call")


async def test_a_grpc_call_is_logged_and_named_in_its_trailers() -> None:
    with logged() as lines:
        async with running_server() as server:
            call = server.generation.GenerateStream(stream_request(SECRET), metadata=(("x-request-id", "mine"),))
            assert [m async for m in call][-1].WhichOneof("event") == "finished"
            assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
            bad = server.generation.Generate(
                pb.GenerateRequest(text=SECRET, model=SECRET), metadata=(("x-request-id", "b"),)
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await bad
            assert dict(caught.value.trailing_metadata() or ())["x-request-id"] == "b"
            slow = server.generation.GenerateStream(stream_request("x" * 100, salt="slow"))
            await anext(aiter(slow))
            slow.cancel()
            for _ in range(100):
                if lines.of("call", status="CANCELLED"):
                    break
                await asyncio.sleep(0.02)
    (done,) = lines.of("call", status="OK", face="grpc")
    assert (done["request_id"], done["endpoint"]) == ("mine", "v1.GenerationService/GenerateStream")
    assert done["output_tokens"] == len(SECRET) + 1  # and the token that prompts begin with
    (refused,) = lines.of("call", status="NOT_FOUND")
    assert (refused["request_id"], refused["reason"]) == ("b", "MODEL_NOT_FOUND")
    (cancelled,) = lines.of("call", status="CANCELLED")
    assert cancelled["left"]
    assert SECRET not in lines.text


def test_a_line_names_the_key_and_metrics_need_one_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = {"authorization": f"Bearer {make_key(file, 'laptop', 'team-a')}"}
    with logged() as lines, running(keys_file=file) as server:
        server.client.post(COMPLETIONS, json={"prompt": "x"}, headers=key)
        server.client.get("/v1/models", headers=key)
        assert server.client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 401
        assert server.client.get("/metrics").status_code == 401
        assert server.client.get("/v1/loads").status_code == 401
        assert server.client.get("/metrics", headers=key).status_code == 200
        secret = key["authorization"].removeprefix("Bearer ")
    (refused,) = lines.of("call", endpoint="/v1/loads")
    assert refused["status"] == "401"
    for path in (COMPLETIONS, "/v1/models", "/metrics"):
        (line,) = lines.of("call", endpoint=path, status="200")
        assert (line["key"], line["tenant"]) == ("laptop", "team-a")
    (refused,) = lines.of("call", endpoint=COMPLETIONS, status="401")
    assert refused["reason"] == "UNAUTHENTICATED"
    assert "key" not in refused
    assert secret not in lines.text
    with running(keys_file=file, open_metrics=True) as server:
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("given", [b"gr\xf6\xdfe", b"a\tb"])
async def test_bug_an_id_that_no_grpc_trailer_can_hold_is_replaced(given: bytes) -> None:
    """HTTP/2 allows it in a header, so clients that are built on it send it; the answer was lost."""
    headers = {
        b":method": b"POST", b":scheme": b"http", b":path": b"/specdec.api.v1.GenerationService/Tokenize",
        b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc", b"x-request-id": given,
    }  # fmt: skip
    message = pb.TokenizeRequest(text="a").SerializeToString()
    answer = pb.TokenizeResponse(token_ids=[2, 97]).SerializeToString()
    block = b"".join(b"\0" + _sized(name) + _sized(value) for name, value in headers.items())
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b"")
    sent += _frame(1, 4, 1, block) + _frame(0, 1, 1, b"\0" + len(message).to_bytes(4) + message)
    with logged() as lines:
        async with running_server() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses.grpc_port)
            writer.write(sent)
            async with asyncio.timeout(10):
                await reader.readuntil(b"\0" + len(answer).to_bytes(4) + answer)
            writer.close()
    (line,) = lines.of("call", endpoint="v1.GenerationService/Tokenize")
    assert (line["status"], len(line["request_id"])) == ("OK", 32)


def _sized(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + content
