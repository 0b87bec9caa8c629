"""A server to put load on, whatever it speaks."""

from __future__ import annotations

from typing import Protocol

from bench.serve.ask import Ask
from bench.serve.record import Record


class Endpoint(Protocol):
    """Sends one request at once and notes its answer; any number may run at the same time."""

    async def send(self, ask: Ask, record: Record) -> None:
        """Note every message and the token counts in ``record``; returns at the end of the answer.

        Raises:
            RefusedError: the server does not take it now.
            SpecdecError: it failed in another way.
        """

    async def close(self) -> None:
        """Let go of connections."""
