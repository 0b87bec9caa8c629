"""Counts the calls inside, and lets no more in once a shutdown begins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from server.request_errors import DrainingError


class DrainGate:
    """Every call that generates passes through `enter`."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether a shutdown has begun."""
        return self._closed

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside for the length of the block.

        Raises:
            DrainingError: the gate is closed.
        """
        if self._closed:
            raise DrainingError
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def drain(self, timeout_s: float) -> int:
        """Close, wait up to ``timeout_s`` seconds until nobody is inside, and return how many still are."""
        self._closed = True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return self._inside
        return 0
