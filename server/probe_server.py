"""Plain HTTP for probes: GET /livez, /readyz, /version, /trace answer JSON. Parsed by h11, served by asyncio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import h11

import specdec
from server.trace_calls import DEFAULT_STEPS, LIMIT_RULE, MAX_STEPS
from specdec.errors import ConfigError, RequestError
from specdec.types import StepTrace
from specdec.types.as_json import trace_dict

_IDLE_S = 30.0
_CHUNK_BYTES = 1 << 14
# status and JSON body of a path
Answer = tuple[int, object]


class ProbeServer:
    """``state`` gives the engine's state and whether the server would take a request now, ``trace`` its last steps."""

    def __init__(
        self,
        host: str,
        port: int,
        state: Callable[[], tuple[str, bool]],
        trace: Callable[[int], Awaitable[list[StepTrace]]],
    ) -> None:
        self._host, self._port, self._state, self._trace = host, port, state, trace
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Begin to listen; returns the port.

        Raises:
            ConfigError: the address is in use or can not be had.
        """
        try:
            self._server = await asyncio.start_server(self._connected, self._host, self._port)
        except OSError as error:
            raise ConfigError(f"HTTP can not listen on {self._host}:{self._port}: {error.strerror or error}") from None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def answer(self, method: str, target: str) -> Answer:
        """What a request gets. ``target``: path and query."""
        path, _, query = target.partition("?")
        state, ready = self._state()
        if method not in ("GET", "HEAD"):
            return 405, {"error": "only GET is served here"}
        if path == "/livez":
            return 200, {"status": "ok", "engine": state}
        if path == "/readyz":
            return (200 if ready else 503), {"status": "ready" if ready else "not ready", "engine": state}
        if path == "/version":
            return 200, {"version": specdec.__version__}
        if path == "/trace":
            return await self._trace_answer(query)
        return 404, {"error": "not found; served here: /livez, /readyz, /version, /trace"}

    async def _trace_answer(self, query: str) -> Answer:
        given = parse_qs(query, keep_blank_values=True).get("limit", [str(DEFAULT_STEPS)])[-1]
        if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= MAX_STEPS):
            return 400, {"error": f"limit: {LIMIT_RULE}", "field": "limit"}
        try:
            return 200, [trace_dict(step) for step in await self._trace(int(given))]
        except RequestError as error:
            return 503, {"error": str(error)}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # a coroutine of asyncio.start_server runs in its own task
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # the peer is gone or idle, or we are closing: nobody to tell
        finally:
            self._connections.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        request: h11.Request | None = None
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                    await _reply(http, writer, "GET", (error.error_status_hint, {"error": "not HTTP"}))
                return
            if event is h11.NEED_DATA:
                http.receive_data(await asyncio.wait_for(reader.read(_CHUNK_BYTES), _IDLE_S))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.EndOfMessage):
                assert request is not None  # h11 gives a message's head first
                method, target = request.method.decode("ascii"), request.target.decode("ascii")
                await _reply(http, writer, method, await self.answer(method, target))
                if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                    return
                http.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed):
                return


async def _reply(http: h11.Connection, writer: asyncio.StreamWriter, method: str, answer: Answer) -> None:
    status, content = answer
    body = json.dumps(content, separators=(",", ":")).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    data = http.send(h11.Response(status_code=status, headers=headers)) or b""
    if method != "HEAD":
        data += http.send(h11.Data(data=body)) or b""
    data += http.send(h11.EndOfMessage()) or b""
    writer.write(data)
    await writer.drain()
