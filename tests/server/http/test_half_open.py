"""Clients that vanish without closing: the kernel detects it, and the server closes the connection."""

from __future__ import annotations

import asyncio
import socket

import pytest

from server.http import http_server
from server.http.http_server import listen

LIMIT_S = 60.0


async def accepted(monkeypatch: pytest.MonkeyPatch, gone_s: float) -> tuple[socket.socket, socket.socket]:
    """A client with hardly any room to receive, and the server's end of its connection."""
    monkeypatch.setattr(http_server, "GONE_S", gone_s)
    (listener,) = await listen("127.0.0.1", 0)
    with listener:
        listener.listen()
        listener.setblocking(False)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        connection, _ = await loop.sock_accept(listener)
        return client, connection


async def test_a_client_that_never_reads_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send_for_ever(connection: socket.socket) -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(connection, b"x" * (1 << 20))

    client, connection = await accepted(monkeypatch, 1.0)
    with client, connection, pytest.raises(OSError, match="timed out"):
        await asyncio.wait_for(send_for_ever(connection), LIMIT_S)


async def test_a_silent_client_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    client, connection = await accepted(monkeypatch, 30.0)
    with client, connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, every, count, unheard_ms = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in times)
        assert idle + every * count <= 2 * 30
        assert unheard_ms == 30_000


async def test_a_slow_reader_gets_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client, connection = await accepted(monkeypatch, 2.0)
    loop = asyncio.get_running_loop()
    size = 1 << 19
    with client, connection:
        sending = asyncio.create_task(loop.sock_sendall(connection, b"x" * size))
        got = 0
        async with asyncio.timeout(LIMIT_S):
            while got < size:
                await asyncio.sleep(0.001)
                got += len(await loop.sock_recv(client, 4096))
            await sending
    assert got == size
