"""The front end's end of the socket to the engine process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from server.frames import FrameReader, pack_frame


class FrameLink(asyncio.Protocol):
    """Hands on every frame in the very callback that its bytes come in: a task that reads would have to be woken first.

    ``last_frame_s``: when something last came, in monotonic seconds. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._cut = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._take: Callable[[list[Any]], None] | None = None
        self._early = bytearray()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_frame_s = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The socket is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """The process's next bytes."""
        self.last_frame_s = time.monotonic()
        if self._take is None:
            self._early += data
        elif not self._gone.done():
            try:
                for frame in self._cut.feed(data):
                    self._take(frame)
            except Exception as error:  # whoever listens is to hear of it, not the event loop
                self._gone.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process closed the socket, or died."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def listen(self, take: Callable[[list[Any]], None]) -> None:
        """Hand every frame to ``take``, from the first one on, until the process closes the socket.

        Raises:
            FrameError: it sent something else.
            Exception: whatever ``take`` raises; it gets no frame after that.
        """
        self._take = take
        if self._early:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)
        await self._gone

    def send(self, *parts: Any) -> None:
        """Queue one frame for the process; a dead one is noticed by `listen`."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack_frame(*parts))

    def close(self) -> None:
        """Close our end."""
        if self._transport is not None:
            self._transport.close()
