"""Uvicorn in our own event loop: it listens, and we say when it begins and ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.http.http_protocol import HEAD_BYTES, HttpProtocol
from specdec.errors import ConfigError

KEEP_ALIVE_S = 75
GONE_S = 60.0  # without a sign of life or a byte read, from a client that is owed something
_GRACE_S = 1.0
_LOOK_S = 0.01


class HttpServer:
    """Serves ``app`` on ``host`` and ``port`` (0: one of the system's choice), over TLS where there is a context for
    it. Signals stay ours."""

    def __init__(self, app: ASGIApp, host: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)
        self._started = False

    async def start(self) -> int:
        """Begin to listen; returns the port.

        Raises:
            ConfigError: the address is in use or can not be had.
        """
        try:
            sockets = await listen(self._host, self._port)
        except OSError as error:
            raise ConfigError(f"HTTP can not listen on {self._host}:{self._port}: {error.strerror or error}") from None
        port: int = sockets[0].getsockname()[1]
        await self._uvicorn.startup(sockets=sockets)
        self._started = True
        return port

    async def stop(self) -> None:
        """Close the port, let answers that are on their way finish for a moment, and close every connection."""
        if not self._started:
            return
        for server in self._uvicorn.servers:
            server.close()
        state = self._uvicorn.server_state
        for connection in list(state.connections):
            if not connection.transport.is_closing():
                connection.shutdown()  # at once where it is idle, else once its answer is out
        await _all_gone(state.connections)
        for connection in list(state.connections):
            connection.transport.abort()  # the call behind it notices that its client is gone
        await _all_gone(state.tasks)
        for task in list(state.tasks):
            task.cancel()


async def _all_gone(what: Collection[Any]) -> None:
    """Wait for a moment until ``what`` is empty."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            while what:
                await asyncio.sleep(_LOOK_S)


async def listen(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of ``host``, all on one port."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without that, the
            # second of two writes waits 40 ms for the client's acknowledgement of the first.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _notice_the_gone(listener)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen = address[1] or sockets[0].getsockname()[1]
            listener.bind((address[0], chosen, *address[2:]))
    except OSError:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def _notice_the_gone(listener: socket.socket) -> None:
    """A client that crashed, lost its network or never reads says nothing, and would be waited for for ever. Accepted
    connections have these options from their listener; other systems than Linux have their own times."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        every_s = max(1, round(GONE_S / 4))
        for name, value in (
            (socket.TCP_KEEPIDLE, max(1, round(GONE_S))), (socket.TCP_KEEPINTVL, every_s), (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, round(GONE_S * 1e3)),
        ):  # fmt: skip
            listener.setsockopt(socket.IPPROTO_TCP, name, value)
