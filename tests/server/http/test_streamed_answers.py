"""Framing of streamed answers in HTTP/1.0 and HTTP/1.1."""

from __future__ import annotations

import json
import socket
from typing import Any

import h11
import pytest

from server.http.answering import named_event, sse
from server.http.ollama import ndjson
from tests.server.http.harness import Server, events

BODY = json.dumps({"prompt": "hello", "stream": True}).encode()


def ask(server: Server, first_line: str, *headers: str, times: int = 1) -> bytes:
    """Return all bytes that the server sends for a streaming call, repeated over one connection that it then closes."""
    head = "\r\n".join([first_line, "host: x", f"content-length: {len(BODY)}", *headers]).encode() + b"\r\n\r\n"
    last = head.replace(b"host: x", b"host: x\r\nconnection: close")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall((head + BODY) * (times - 1) + last + BODY)
        found = b""
        while more := connection.recv(1 << 16):
            found += more
        return found


def parse(received: bytes, times: int = 1) -> list[tuple[h11.Response, bytes]]:
    """Heads and bodies, parsed by a client's h11, which rejects wrong framing."""
    client, found = h11.Connection(h11.CLIENT), []
    for number in range(times):
        client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        if number == 0:
            client.receive_data(received)
            client.receive_data(b"")
        head = client.next_event()
        assert isinstance(head, h11.Response)
        body = b""
        while isinstance(event := client.next_event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        found.append((head, body))
        if number + 1 < times:
            client.start_next_cycle()
    return found


@pytest.mark.parametrize("written", [sse, named_event, ndjson])
def test_no_character_ends_a_line_of_a_stream(written: Any) -> None:
    value = {"type": "a", "text": "".join(map(chr, [*range(0x100), 0x20A8, *range(0x2020, 0x2030), 0x1F600]))}
    lines = written(value).decode().splitlines()
    assert "".join(lines) == written(value).decode().replace("\n", "")
    assert [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line] == [value]


def text_of(body: bytes) -> str:
    *chunks, done = events(body)
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_stream_is_chunked_and_the_connection_stays_open(server: Server) -> None:
    received = ask(server, "POST /v1/completions HTTP/1.1", times=3)
    for head, body in parse(received, 3):
        assert dict(head.headers)[b"transfer-encoding"] == b"chunked"
        assert text_of(body).endswith("hello")


def test_http_1_0_streams_end_with_the_connection(server: Server) -> None:
    ((head, body),) = parse(ask(server, "POST /v1/completions HTTP/1.0"))
    assert b"transfer-encoding" not in dict(head.headers)
    assert text_of(body).endswith("hello")
