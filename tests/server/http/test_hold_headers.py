"""Streams with deferred headers: an error before the first token is a status, on every port."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import openai
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from server.hold_headers import HOLD_HEADER
from server.observe.records import ATTEMPT_HEADER, NO_RETRY_HEADER
from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import completion_pb2_grpc, generation_pb2_grpc
from specdec.api.v1 import generation_pb2 as generation
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import rich
from tests.server.http.calls import Fim
from tests.server.http.harness import Server, running

HOLD = {HOLD_HEADER: "1"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "model": "fake", "max_tokens": 100},
    "/v1/responses": {"input": "hello"},
    "/v1/fim/completions": {"prompt": "hello", "suffix": "x"},
    "/completion": {"prompt": "hello"},
    "/api/generate": {"model": "fake", "prompt": "hello"},
    "/api/chat": {**CHAT, "model": "fake"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(lambda: FakeTokenizer(has_tools=True), fim=Fim()) as found:
        yield found


def body(path: str, salt: str) -> dict[str, Any]:
    return {**STREAMS[path], "stream": True, "cache_salt": salt}


class Mute:
    """A stream, requested in its own thread, whose request reports its start and then sends nothing."""

    def __init__(self, server: Server, path: str, headers: dict[str, str], **fields: str) -> None:
        self.server, self.headers, self.path = server, headers, path
        self.body = body(path, "mute") | fields
        self.status: int | None = None
        self.marked = False
        self.data = b""
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with (
            httpx.Client(base_url=self.server.url, timeout=20) as client,
            client.stream("POST", self.path, json=self.body, headers=self.headers) as response,
        ):
            self.status, self.marked = response.status_code, NO_RETRY_HEADER in response.headers
            self.began.set()
            self.data = response.read()

    def ended(self) -> Mute:
        self._thread.join(15)
        assert not self._thread.is_alive()
        return self


def kill_engine(server: Server, in_flight: int) -> None:
    """Once so many requests run."""
    assert server.comes_to(lambda: server.load.running_requests == server.serving.client.in_flight == in_flight)
    pid = server.serving.client.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def ready_again(server: Server, restarts: int) -> bool:
    engine = server.serving.client.engine
    return server.comes_to(lambda: engine.restarts > restarts and server.client.get("/readyz").status_code == 200)


def test_a_crash_before_the_first_token_is_a_distinct_error_in_every_dialect(server: Server) -> None:
    restarts = server.serving.client.engine.restarts
    held = [Mute(server, path, HOLD) for path in STREAMS]
    plain, sdk = (
        Mute(server, "/v1/completions", {}),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, default_headers=HOLD),
    )
    failed: list[Exception] = []

    def ask() -> None:
        try:
            sdk.completions.create(model="fake", prompt="hello", stream=True, extra_body={"cache_salt": "mute"})
        except openai.APIStatusError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert plain.began.wait(10)
    kill_engine(server, len(held) + 2)
    for mute in held:
        assert mute.ended().status == 503, mute.path
        assert b"data:" not in mute.data, mute.path
    assert not any(mute.marked for mute in held)
    assert plain.ended().status == 200  # without the header it had begun, and broke off
    assert b'"error"' in plain.data
    asking.join(15)
    assert [type(error) for error in failed] == [openai.InternalServerError]  # which its own retries take up
    assert ready_again(server, restarts)
    again = sdk.completions.create(model="fake", prompt="hello", stream=True)
    assert "".join(chunk.choices[0].text for chunk in again if chunk.choices).endswith("hello")


def test_a_retried_call_whose_engine_dies_again_is_not_retryable(server: Server) -> None:
    restarts = server.serving.client.engine.restarts
    # A request that was in flight at an earlier death would run alone.
    first, second = (
        Mute(server, "/v1/completions", {**HOLD, ATTEMPT_HEADER: str(attempt)}, prompt="again") for attempt in (1, 2)
    )
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=[("grpc.enable_retries", 0)]) as channel:
        held = mute_calls(channel, (ATTEMPT_HEADER, "2"), text="again")
        kill_engine(server, 4)
        assert (first.ended().status, first.marked) == (503, False)
        assert (second.ended().status, second.marked) == (503, True)
        for call in held:
            assert call.code() == grpc.StatusCode.UNAVAILABLE
            assert (NO_RETRY_HEADER, "true") in call.trailing_metadata()
    assert ready_again(server, restarts)


@pytest.mark.parametrize("path", STREAMS)
def test_deferred_headers_do_not_change_the_stream(server: Server, path: str) -> None:
    def outcome(headers: dict[str, str]) -> tuple[int, Any, list[bytes]]:
        sent = body(path, "") | {"seed": 1}
        response = server.client.post(path, json=sent, headers={"x-request-id": "one", **headers})
        kept = re.sub(
            rb'"(id|call_id|item_id|created\w*|\w+_at|\w+_duration)":("[^"]*"|[0-9.]+)', b"", response.content
        )
        return response.status_code, response.headers["content-type"], kept.splitlines()

    held, plain = outcome(HOLD), outcome({HOLD_HEADER: "0"})
    assert held == plain
    assert held[0] == 200


def test_a_failure_before_the_first_token_is_a_status(server: Server) -> None:
    sent = body("/v1/completions", "broken")
    assert server.client.post("/v1/completions", json=sent, headers=HOLD).status_code == 500
    assert server.client.post("/v1/completions", json=sent).status_code == 200


def test_an_invalid_value_is_rejected(server: Server) -> None:
    response = server.client.post("/v1/completions", json=body("/v1/completions", ""), headers={HOLD_HEADER: "yes"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == HOLD_HEADER


def test_deferred_headers_can_be_the_servers_default() -> None:
    with running(hold_headers=True) as server:
        sent = body("/v1/completions", "broken")
        assert server.client.post("/v1/completions", json=sent).status_code == 500
        assert server.client.post("/v1/completions", json=sent, headers={HOLD_HEADER: "0"}).status_code == 200


def mute_calls(channel: grpc.Channel, *metadata: tuple[str, str], text: str = "hello") -> list[Any]:
    """One of each method that streams, held back."""
    generate = generation.GenerateStreamRequest(text=text, cache={"salt": "mute"})
    complete = completion.CompleteRequest(
        fim={"prefix": text}, cache={"salt": "mute"},
        completion=completion.CompletionOptions(mode=completion.CompletionOptions.MODE_PREFIX),
    )  # fmt: skip
    return [
        generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(
            generate, metadata=(*HOLD.items(), *metadata)
        ),
        completion_pb2_grpc.CompletionServiceStub(channel).Complete(complete, metadata=(*HOLD.items(), *metadata)),
    ]


def test_grpc_sends_no_initial_metadata_before_the_first_token(server: Server) -> None:
    restarts = server.serving.client.engine.restarts
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=[("grpc.enable_retries", 0)])
    held = mute_calls(channel)
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    plain = stub.GenerateStream(generation.GenerateStreamRequest(text="hello", cache={"salt": "mute"}))
    assert next(plain).WhichOneof("event") == "started"
    kill_engine(server, 3)
    assert plain.initial_metadata() is not None
    for call in [*held, plain]:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        assert rich(caught.value)[ErrorInfo].reason == "ENGINE_UNAVAILABLE"  # type: ignore[arg-type]
    assert ready_again(server, restarts)
    messages = list(stub.GenerateStream(generation.GenerateStreamRequest(text="hello"), metadata=(*HOLD.items(),)))
    assert [message.WhichOneof("event") for message in messages[:2]] == ["started", "delta"]
    assert messages[-1].WhichOneof("event") == "finished"
    channel.close()
