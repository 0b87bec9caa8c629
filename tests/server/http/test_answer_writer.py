"""Framing of streamed answers in HTTP/1.0 and HTTP/1.1."""

from __future__ import annotations

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any

import h11
import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from server.http.answering import named_event, sse
from server.http.http_server import AnswerWriter
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


class Wire:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.data, self.writes = b"", 0

    def write(self, data: bytes) -> None:
        self.data += data
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def answering(wire: Wire, method: bytes = b"GET") -> RequestResponseCycle:
    """Uvicorn's part of a call that has been read."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(method + b" / HTTP/1.1\r\nhost: x\r\n\r\n")
    connection.next_event()
    connection.next_event()
    scope: Any = {"method": method.decode(), "http_version": "1.1", "headers": []}
    logger: Any = None
    return RequestResponseCycle(
        scope, connection, wire, FlowControl(wire), logger, logger, False, [], SimpleNamespace(set=lambda: None),
        lambda: None,
    )  # type: ignore[arg-type]  # fmt: skip


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def test_each_nonempty_piece_is_a_chunk() -> None:
    wire = Wire()
    sending = AnswerWriter(answering(wire))
    for message in (start(), piece(b"a" * 17, True), piece(b"", True), piece(b"bc", True), piece(b"d", False)):
        await sending.send(message)
    assert wire.data.partition(b"\r\n\r\n")[2] == b"11\r\n" + b"a" * 17 + b"\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n"
    with pytest.raises(RuntimeError, match="already completed"):
        await sending.send(piece(b"late", True))


@pytest.mark.parametrize(
    ("method", "status", "headers", "sent"),
    [(b"HEAD", 200, (), b""), (b"GET", 204, (), b""), (b"GET", 200, ((b"Content-Length", b"3"),), b"abc")],
)
async def test_bodies_of_known_length_and_empty_bodies_are_not_chunked(
    method: bytes, status: int, headers: tuple[tuple[bytes, bytes], ...], sent: bytes
) -> None:
    wire = Wire()
    sending = AnswerWriter(answering(wire, method))
    await sending.send(start(status, *headers))
    body = b"" if status == 204 else b"abc"
    await sending.send(piece(body, True))
    await sending.send(piece(b"", False))
    assert wire.data.partition(b"\r\n\r\n")[2] == sent


async def test_nothing_is_sent_after_a_disconnect() -> None:
    wire = Wire()
    cycle = answering(wire)
    sending = AnswerWriter(cycle)
    await sending.send(start())
    await asyncio.sleep(0)
    before, cycle.disconnected = wire.data, True
    await sending.send(piece(b"a", True))
    await sending.send(piece(b"b", False))
    assert wire.data == before


async def test_headers_are_sent_with_the_first_piece_without_waiting_for_more() -> None:
    wire = Wire()
    sending = AnswerWriter(answering(wire))
    await sending.send(start())
    assert not wire.data
    await asyncio.sleep(0)
    assert wire.data.startswith(b"HTTP/1.1 200")
    assert wire.data.endswith(b"\r\n\r\n")
    together = AnswerWriter(answering(second := Wire()))
    await together.send(start())
    await together.send(piece(b"a", True))
    await asyncio.sleep(0)
    assert second.data == wire.data + b"1\r\na\r\n"
    assert second.writes == 1
