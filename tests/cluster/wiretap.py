"""A TCP relay between a router and a server: it records what the router really sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """A request as the server received it. ``headers`` by lower-case name; ``body`` empty if it is not JSON."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Wiretap:
    """``seen``: the received requests, oldest first."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)

    def last(self, path: str) -> Seen | None:
        """The newest request for ``path``."""
        return next((seen for seen in reversed(self.seen) if seen.path.partition("?")[0] == path), None)


class _Requests:
    """Splits what a client writes into requests; supports bodies with a Content-Length, which routers send."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[Seen]:
        self._data += data
        found = []
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            length = int(headers.get("content-length", 0))
            if len(rest) < length:
                break
            self._data = rest[length:]
            found.append(Seen(lines[0].split(" ")[1], headers, json.loads(rest[:length]) if length else {}))
        return found


@asynccontextmanager
async def wiretap(port: int) -> AsyncIterator[Wiretap]:
    """Relays to ``port`` of this machine."""
    tap, tasks = Wiretap(), set[asyncio.Task[None]]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: _Requests | None) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if requests is not None:
                    tap.seen += requests.feed(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for task in (
            asyncio.create_task(pump(reader, back, _Requests())), asyncio.create_task(pump(there, writer, None)),
        ):  # fmt: skip
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    try:
        yield tap
    finally:
        server.close()
        for task in tasks:
            task.cancel()
