"""Supervises background tasks, so that no error ends one silently."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from specdec.errors import SpecdecError

_LOG = logging.getLogger(__name__)
# Each restart waits twice as long as the one before; the pause is reset when the work ran for FORGIVEN_S.
FIRST_PAUSE_S, LONGEST_PAUSE_S, FORGIVEN_S = 0.25, 10.0, 60.0


class Supervisor:
    """Runs ``work`` until it returns. Logs and counts its errors, and restarts it with exponential back-off."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        self._name, self._work = name, work
        self._task: asyncio.Task[None] | None = None
        self.failures = 0

    def start(self) -> None:
        """Starts the work in the running event loop."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancels the work, if it was started, and waits for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                return await self._work()
            except Exception as error:
                self.failures += 1
                trace = None if isinstance(error, SpecdecError) else error
                _LOG.error("%s failed (%d in all): %s", self._name, self.failures, error, exc_info=trace)
            if time.monotonic() - began > FORGIVEN_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
