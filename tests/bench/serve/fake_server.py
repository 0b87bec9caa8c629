"""A server whose latencies are known."""

from __future__ import annotations

import asyncio
from typing import cast

from specdec.errors import SpecdecError
from specdec.load.request import LoadRequest, Record, RefusedError
from tests.bench.virtual_loop import VirtualLoop


class FakeServer:
    """``first_s`` to the first message, ``gap_s`` between them, ``chunks`` of ``tokens`` each (None: it reports none);
    so many at a time as it has ``places``. It answers nobody from ``stall[0]`` to ``stall[1]``. An ask named "refused",
    "failed" or "hangs" is; "blocks" keeps the generator itself busy for ``block_s``."""

    def __init__(
        self, *, first_s: float = 0.2, gap_s: float = 0.05, chunks: int = 5, tokens: int | None = 2,
        places: int = 10**6, stall: tuple[float, float] = (0.0, 0.0), block_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.first_s, self.gap_s, self.chunks, self.tokens = first_s, gap_s, chunks, tokens
        self.stall, self.block_s = stall, block_s
        self.most = self.running = 0
        self.sent_s: list[float] = []
        self._places = asyncio.Semaphore(places)

    async def send(self, ask: LoadRequest, record: Record) -> None:
        loop = cast(VirtualLoop, asyncio.get_running_loop())
        self.sent_s.append(loop.time())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._answer(ask, record, loop)
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass

    async def _answer(self, ask: LoadRequest, record: Record, loop: VirtualLoop) -> None:
        if ask.name.startswith("blocks"):
            loop.block(self.block_s)
        if ask.name.startswith("refused"):
            raise RefusedError("full", 0.75)
        if ask.name.startswith("failed"):
            raise SpecdecError("broken")
        if ask.name.startswith("hangs"):
            await asyncio.sleep(10**6)
        async with self._places:
            if self.stall[0] <= loop.time() < self.stall[1]:
                await asyncio.sleep(self.stall[1] - loop.time())
            await asyncio.sleep(self.first_s)
            for number in range(self.chunks):
                await asyncio.sleep(self.gap_s if number else 0.0)
                record.chunk(loop.time(), self.tokens)
        record.prompt_tokens, record.output_tokens = 7, self.chunks * (self.tokens or 0)
