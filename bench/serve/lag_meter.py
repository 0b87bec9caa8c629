"""How late our own event loop wakes up: a load generator that is late measures itself."""

from __future__ import annotations

import asyncio

from bench.background_watch import BackgroundWatch

TICK_S = 0.01


class LagMeter(BackgroundWatch):
    """Use as ``async with`` around the work. ``lags_ms``: by how much each of many short sleeps overran."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            until = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_ms.append((clock() - until) * 1e3)
