"""Time in which this process runs: what passes while it is stopped does not count."""

from __future__ import annotations

import asyncio

from bench.background_watch import BackgroundWatch

TICK_S = 0.5
STOPPED_S = 5.0  # between two ticks: more than a busy machine makes of one


class RunClock(BackgroundWatch):
    """Use as ``async with``. ``running_s`` grows while it runs; ``stops`` counts the times it was stopped, when calls
    may break for which the server is not to blame."""

    def __init__(self) -> None:
        self.running_s = 0.0
        self.stops = 0

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        last = now()
        while True:
            await asyncio.sleep(TICK_S)
            passed, last = now() - last, now()
            stopped = passed > STOPPED_S
            self.stops += stopped
            self.running_s += TICK_S if stopped else passed
