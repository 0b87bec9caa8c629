"""The HTTP server: uvicorn in the caller's event loop, its connections and its calls."""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from server.auth.access import TlsFiles
from server.body_budget import BodyBudget, connection_limit
from specdec.errors import ConfigError

_LENGTH, _CODING = b"content-length", b"transfer-encoding"
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_LOG = logging.getLogger(__name__)


class AnswerWriter:
    """Writes the answer of one call, as uvicorn's ``cycle`` does, faster in two ways.

    The head is sent together with the first piece of the body, because each write wakes the client, often on the
    server's processor. The pieces of a chunked body are framed here, because h11 takes longer for that than the rest of
    a message takes.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._chunked = False
        self._head = b""

    async def send(self, message: Any) -> None:
        """ASGI's ``send``."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        if not cycle.response_started and message["type"] == "http.response.start":
            self._begin(message)
            return
        if self._chunked and not cycle.response_complete and message["type"] == "http.response.body":
            if body := message.get("body", b""):
                head, self._head = self._head, b""
                cycle.transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))
            if message.get("more_body", False):
                return
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self._send_head()
        await cycle.send(message)

    def _begin(self, message: Any) -> None:
        """As uvicorn does, without writing yet."""
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        status, headers = message["status"], [*cycle.default_headers, *message.get("headers", ())]
        if CLOSE_HEADER in cycle.scope["headers"] and CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        response = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
        self._head = cycle.conn.send(response) or b""
        self._chunked = _CHUNKED in self._head.lower() and cycle.scope["method"] != "HEAD"
        asyncio.get_running_loop().call_soon(self._send_head)

    def _send_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self._cycle.disconnected:
            self._cycle.transport.write(head)


HEAD_BYTES = 1 << 16  # of the first line and the headers
HEAD_LINES = 128  # h11 takes 0.1 ms for each
MOST_CHUNKS, CHUNK_BYTES = 1024, 128  # h11 takes 20 us for a chunk: of more, the mean length is at least this
HEAD_S = 30.0  # for them to arrive
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class StrictBuffer(ReceiveBuffer):
    """The bytes received over a connection.

    h11 accepts heads that a proxy may read differently, which lets a client smuggle a call past it. It also accepts
    heads and chunks that take it seconds, during which nothing else is served. This buffer refuses both, and the
    connection ends.
    """

    _chunks = _body_bytes = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head or of a chunked body's trailers; None if they are incomplete.

        Raises:
            LocalProtocolError: it is too large or has too many lines, a line ends without CR or continues in the next
                (RFC 9112, 2.2 and 5.2), or two headers frame the body (6.1).
        """
        lines: list[bytearray] | None = super().maybe_extract_lines()
        if lines is None:
            return None
        head = self._extracted
        if len(head) > HEAD_BYTES or len(lines) > HEAD_LINES:
            raise h11.LocalProtocolError("the head is too large")
        if head.count(b"\n") != head.count(b"\r\n"):
            raise h11.LocalProtocolError("a line ends without CR")
        if not lines:
            return lines
        self._chunks = self._body_bytes = 0
        if any(line[:1] in (b" ", b"\t") for line in lines):
            raise h11.LocalProtocolError("a header continues in the next line")
        named = {bytes(line.partition(b":")[0]).lower() for line in lines[1:]}
        if _CODING in named and (_LENGTH in named or lines[0].endswith(b"/1.0")):
            raise h11.LocalProtocolError("two headers say where the body ends")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line in front of a chunk; None if it is incomplete.

        Raises:
            LocalProtocolError: the chunks are many and small.
        """
        line: bytearray | None = super().maybe_extract_next_line()
        if line is not None:
            self._chunks += 1
            if self._chunks > MOST_CHUNKS + self._body_bytes // CHUNK_BYTES:
                raise h11.LocalProtocolError("the chunks are too small")
        return line

    def _extract(self, count: int) -> bytearray:
        self._extracted: bytearray = super()._extract(count)
        self._body_bytes += count
        return self._extracted


class HttpProtocol(H11Protocol):
    """Uvicorn's protocol over h11. Unlike its faster one, it reads the body of a call that offers an upgrade, as Java's
    clients do.

    The first line and the headers must arrive within `HEAD_S` seconds of the connection or of their first byte.
    """

    def __init__(self, *args: Any, budget: BodyBudget, **options: Any) -> None:
        super().__init__(*args, **options)
        self._budget = budget
        self.conn._receive_buffer = StrictBuffer()  # h11 has no option for it
        self.app = self._answer
        self._head_timer: asyncio.TimerHandle | None = None
        self.began_s = self.loop.time()  # the connection or its last call

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Beyond the limit on connections, one that waits for a call or its body is closed in favour of the new one."""
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > connection_limit():
            self._make_room()

    def _make_room(self) -> None:
        others: list[Any] = [each for each in self.connections if each is not self]
        idle = [each for each in others if each.cycle is None or each.cycle.response_complete]
        sending = [each for each in others if each.cycle is not None and each.cycle.more_body]
        closed = min(idle or sending, key=lambda each: each.began_s, default=self)
        if closed is self:
            _LOG.warning("refused a connection: %d are open and busy", len(others))
            self.transport.write(_BUSY)
        closed.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)
        self.app = self.config.loaded_app  # a method of ours would keep this object until the next garbage collection

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self._head_timer is None:
            self._expect_head()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application with this module's writer. A connection has one call at a time, the one of ``cycle``."""
        self.began_s = self.loop.time()
        if scope["path"].startswith(("http://", "https://")):  # RFC 9112, 3.2.2: from clients of a proxy
            scope["path"] = "/" + scope["path"].partition("://")[2].partition("/")[2]
        send = AnswerWriter(self.cycle).send
        declared = (int(value) for name, value in scope["headers"] if name == _LENGTH)
        with self._budget.body(self.transport.abort, next(declared, self._budget.longest)) as body:

            async def receive_counted() -> Any:
                message = await receive()
                await body.reserve(len(message.get("body", b"")))
                if not message.get("more_body", False):
                    body.arrived(body.size)
                return message

            await self.config.loaded_app(scope, receive_counted, send)

    def _should_upgrade(self) -> bool:
        return False  # offers of other protocols are ignored without a warning

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


HANDSHAKE_S = 10  # for TLS


class TlsConnection(SSLProtocol):
    """TLS under an `HttpProtocol`, as asyncio sets it up, but connections count from before their handshake on.

    Beyond the limit, the oldest that has not finished its handshake is closed in favour of the new one.

    Each connection starts with the context of the current files. OpenSSL keeps sessions, and the keys of session
    tickets, in that context. A resumed session skips the check of the client's certificate, so it must not outlive the
    files that it was checked against.
    """

    def __init__(
        self,
        make: Callable[..., HttpProtocol],
        tls: TlsFiles,
        opened: dict[TlsConnection, Any],
        **options: Any,
    ) -> None:
        self._http = make(**options)
        loop, waiter = asyncio.get_running_loop(), cast(Any, None)  # which asyncio allows
        context = tls.current().context
        super().__init__(loop, self._http, context, waiter, server_side=True, ssl_handshake_timeout=HANDSHAKE_S)
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        shaking = (each for each in self._opened if each._http.transport is None)
        if len(self._opened) >= connection_limit() and (oldest := next(shaking, None)) is not None:
            self._opened.pop(oldest).abort()
        self._opened[self] = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        self._opened.pop(self, None)
        super().connection_lost(exc)


KEEP_ALIVE_S = 75
GONE_S = 60.0  # without a sign of life or a byte read, from a client that waits for an answer
_GRACE_S = 1.0  # for answers that are being written when the server stops
_POLL_S = 0.01


class HttpServer:
    """Serves ``app`` on ``host`` and ``port`` (0: the system chooses one), over TLS if ``tls`` is given.

    Leaves signals to the caller.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsFiles | None = None,
        budget: BodyBudget | None = None,
    ) -> None:
        self._host, self._port = host, port
        protocol: Any = partial(HttpProtocol, budget=budget or BodyBudget())
        if tls is not None:
            protocol = partial(TlsConnection, protocol, tls, {})
        config = uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False,
            server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )  # fmt: skip
        config.load()
        self._uvicorn = uvicorn.Server(config)
        self._uvicorn.lifespan = config.lifespan_class(config)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address is in use or not available.
        """
        try:
            sockets = await listen(self._host, self._port)
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(
                f"HTTP cannot listen on {self._host}:{self._port}: {reason}; choose another with --http-port or --host"
            ) from None
        port: int = sockets[0].getsockname()[1]
        await self._uvicorn.startup(sockets=sockets)
        return port

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Close the port, wait up to ``grace_s`` seconds for answers being written, and close all connections."""
        if not self._uvicorn.started:
            return
        for server in self._uvicorn.servers:
            server.close()
        state = self._uvicorn.server_state
        for connection in list(state.connections):
            if not connection.transport.is_closing():
                connection.shutdown()  # at once if idle, else after its answer
        await _all_gone(state.connections, grace_s)
        for connection in list(state.connections):
            connection.transport.abort()  # its call sees that the client is gone
        await _all_gone(state.tasks, grace_s)
        for task in list(state.tasks):
            task.cancel()


async def _all_gone(what: Collection[Any], within_s: float) -> None:
    """Wait up to ``within_s`` seconds for ``what`` to become empty."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while what:
                await asyncio.sleep(_POLL_S)


async def listen(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of ``host``, all on one port."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            # asyncio turns Nagle's algorithm off only for sockets that name their protocol. With it, the second of two
            # writes waits 40 ms for the client's acknowledgement of the first.
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
    """Detect clients that crashed, lost their network or never read. Accepted connections inherit these options from
    their listener."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, round(GONE_S / 4))
    for name, value in (
        (socket.TCP_KEEPIDLE, max(1, round(GONE_S))), (socket.TCP_KEEPINTVL, every_s), (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(GONE_S * 1e3)),
    ):  # fmt: skip
        listener.setsockopt(socket.IPPROTO_TCP, name, value)
