"""A client that leaves, at any stage, leaves nothing behind in the engine."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.http.harness import CHAT, COMPLETIONS, Server, running

STAGES = [
    ("prefill", False, COMPLETIONS), ("prefill", True, COMPLETIONS), ("slow", False, COMPLETIONS),
    ("slow", True, COMPLETIONS), ("slow", False, CHAT), ("slow", True, CHAT),
]  # fmt: skip


@pytest.fixture
def server() -> Iterator[Server]:
    """A separate server, so that its engine's count of aborts starts at 0."""
    with running() as found:
        yield found


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection over which a request was sent."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
    return connection


def body_of(path: str, salt: str, stream: bool, **more: Any) -> dict[str, Any]:
    text = "x" * 100
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "max_tokens": 100, "cache_salt": salt, "stream": stream, **more}


def test_a_disconnect_at_any_stage_cancels_the_request(server: Server) -> None:
    gone = []
    for salt, stream, path in STAGES:
        connection = send(server, path, body_of(path, salt, stream))
        if stream and salt == "slow":
            connection.recv(100)
        gone.append(connection)
    assert server.comes_to(lambda: server.serving.client.in_flight == len(STAGES))
    left_at = time.monotonic()
    for connection in gone:
        connection.close()
    assert server.comes_to(lambda: server.serving.client.in_flight == 0, 2)
    assert time.monotonic() - left_at < 2  # the prefills alone would take 4 s
    assert server.idle(aborts=len(STAGES))


def test_all_requests_of_a_call_are_cancelled(server: Server) -> None:
    connection = send(server, COMPLETIONS, body_of(COMPLETIONS, "prefill", False, prompt=["a", "b", "c"], n=2))
    assert server.comes_to(lambda: server.serving.client.in_flight == 3)
    connection.close()
    assert server.idle(aborts=3)


def test_a_stalled_reader_blocks_no_other_and_is_cancelled_on_disconnect(server: Server) -> None:
    idle = send(server, COMPLETIONS, body_of(COMPLETIONS, "slow", True, n=16, return_token_ids=True))
    assert server.comes_to(lambda: server.serving.client.in_flight == 1)
    for _ in range(3):
        assert server.ask(prompt="hello")["choices"][0]["text"].endswith("hello")
    idle.close()
    assert server.idle(aborts=1)


def test_an_incomplete_body_reaches_no_engine(server: Server) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n{"prompt":')
    time.sleep(0.1)
    connection.close()
    assert server.comes_to(lambda: not server.serving._http._uvicorn.server_state.tasks)  # type: ignore[union-attr]
    assert server.idle(aborts=0)


def test_connected_clients_get_complete_answers_while_others_disconnect(server: Server) -> None:
    for _ in range(3):
        send(server, COMPLETIONS, body_of(COMPLETIONS, "prefill", True)).close()
    chunks = server.stream(prompt="hello")
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]).endswith("hello")
    assert server.comes_to(lambda: server.serving.client.in_flight == 0)
