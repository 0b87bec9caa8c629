"""One HTTP/1.1 connection."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.exchange import Exchange

HEAD_BYTES = 1 << 16
HEAD_S = 30.0


class HttpProtocol(H11Protocol):
    """Uvicorn's own, over h11: unlike its faster one it reads the body of a call that offers an upgrade, as Java's
    clients do. First line and headers must come whole within `HEAD_S` seconds of the connection or of their first byte.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """The client's next bytes."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self._head_timer is None:
            self._expect_head()

    def handle_events(self) -> None:
        """What has come may begin a call."""
        super().handle_events()
        if self.cycle is not None:
            # Uvicorn makes the objects itself; what is different about ours begins with the answer.
            self.cycle.__class__ = Exchange

    def _should_upgrade(self) -> bool:
        return False  # to no protocol, and that is nothing to warn of

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
