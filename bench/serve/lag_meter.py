"""How late our own event loop wakes up: a load generator that is late measures itself."""

from __future__ import annotations

import asyncio
from types import TracebackType

TICK_S = 0.01


class LagMeter:
    """Use as ``async with`` around the work. ``lags_ms``: by how much each of many short sleeps overran."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LagMeter:
        self._task = asyncio.create_task(self._tick(), name="lag-meter")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None  # set on entering
        self._task.cancel()

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            until = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_ms.append((clock() - until) * 1e3)
