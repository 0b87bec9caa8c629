"""A gRPC client that vanishes without closing is probed and then disconnected."""

from __future__ import annotations

import asyncio

import pytest

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
