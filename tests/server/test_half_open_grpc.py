"""A gRPC client that vanishes without closing is probed and then disconnected; one that takes no answer delays only its
own call."""

from __future__ import annotations

import asyncio
import struct

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.grpc import server as grpc_server
from tests.server.harness import running_server, stream_request

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, SETTINGS_READ = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
LIMIT_S = 60.0


async def test_a_client_that_answers_no_ping_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "GONE_S", 1.0)
    monkeypatch.setattr(grpc_server, "ANSWER_S", 1.0)
    async with running_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses.grpc_port)
        writer.write(PREFACE + SETTINGS + SETTINGS_READ)
        async with asyncio.timeout(LIMIT_S):
            await reader.read()  # to the end: the server's own settings, its ping, and that it hangs up
        writer.close()
        # A client that answers pings stays connected, however long it sends nothing else.
        slow = server.generation.GenerateStream(stream_request("x" * 60, salt="slow"))
        assert [message async for message in slow][-1].WhichOneof("event") == "finished"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


WATCH = frame(1, 4, 1, b"".join([
    header(b":method", b"POST"), header(b":scheme", b"http"), header(b":path", b"/grpc.health.v1.Health/Watch"),
    header(b":authority", b"localhost"), header(b"te", b"trailers"), header(b"content-type", b"application/grpc"),
])) + frame(0, 1, 1, bytes(5))  # fmt: skip


async def test_bug_a_watcher_of_the_health_that_receives_nothing_delays_no_other() -> None:
    """It needs no key, and it kept the server from its end, upon a second signal too."""
    async with running_server() as server, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.addresses.grpc_port)
        no_window = struct.pack(">HI", 4, 0)  # for the answers
        writer.write(PREFACE + frame(4, 0, 0, no_window) + SETTINGS_READ + WATCH)
        try:
            await reader.readuntil(b"application/grpc")  # the headers, before the message
            watch = health_pb2_grpc.HealthStub(server.channel).Watch(health_pb2.HealthCheckRequest())
            seen = [(await watch.read()).status]
            stopping = asyncio.create_task(server.serving.stop())
            seen.append((await watch.read()).status)
            await stopping
            assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
        finally:
            writer.close()
