"""Clients that are no clients: half a head, half a body, nothing at all, answers never read; gone without a word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.soak.grpc_visits import LEFT
from bench.soak.place import Place

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SMALL_BUFFER = 2048


async def half_a_head(place: Place) -> str:
    """Headers that never end."""
    async with _connected(place.http_port) as connection:
        await _send(connection, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        await _linger(place)
    return LEFT


async def half_a_body(place: Place) -> str:
    """A body that never ends."""
    async with _connected(place.http_port) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n"
        await _send(connection, head + b'{"prompt":')
        await _linger(place)
    return LEFT


async def silence(place: Place) -> str:
    """Connected, to either port, and no more."""
    async with _connected(place.random.choice((place.http_port, place.grpc_port))):
        await _linger(place)
    return LEFT


async def half_open(place: Place) -> str:
    """HTTP/2 that is begun, and then nothing is answered, not even a ping."""
    async with _connected(place.grpc_port) as connection:
        await _send(connection, _PREFACE + (_SETTINGS if place.random.random() < 0.5 else b""))
        await _linger(place)
    return LEFT


async def never_read(place: Place) -> str:
    """Asks for much and reads nothing of it."""
    body = {"prompt": place.cut(), "max_tokens": 48, "n": 3, "stream": True, "logprobs": 5, "return_token_ids": True}
    data = json.dumps(body).encode()
    async with _connected(place.http_port) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        await _send(connection, head + data)
        await _linger(place)
    return LEFT


async def half_closed(place: Place) -> str:
    """Says that it will send no more, and waits for the answer; either is an end."""
    data = json.dumps({"prompt": place.cut(200), "max_tokens": 8}).encode()
    async with _connected(place.http_port) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
        await _send(connection, head + data)
        connection.shutdown(socket.SHUT_WR)
        await asyncio.get_running_loop().sock_recv(connection, 1 << 16)
    return LEFT


async def nonsense(place: Place) -> str:
    """Bytes that are no HTTP at all, to either port."""
    port = place.random.choice((place.http_port, place.grpc_port))
    async with _connected(port) as connection:
        await _send(connection, place.random.randbytes(place.random.randrange(1, 400)))
        await _linger(place)
    return LEFT


@asynccontextmanager
async def _connected(port: int) -> AsyncIterator[socket.socket]:
    """A connection with hardly any room to receive, that is reset in the end, as one whose client is gone."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):  # a server may hang up on such clients at any time
            yield connection


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _linger(place: Place) -> None:
    await asyncio.sleep(place.random.choice((0.0, 0.1, 1.0, 5.0)))
