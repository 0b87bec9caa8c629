"""One clock for a run, however often it is taken up."""

from __future__ import annotations

import asyncio
import time


class RunClock:
    """``zero_s``: the beginning of the run on the event loop's clock, by which everything in this process is timed."""

    def __init__(self, started_s: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        self.zero_s = self._begun_s - (time.time() - started_s)

    @property
    def spent_s(self) -> float:
        """Seconds since this process began to ask."""
        return self._clock() - self._begun_s

    def begin(self) -> None:
        """It begins to ask."""
        self._begun_s = self._clock()
