"""How a server's memory goes while it is under load."""

from __future__ import annotations

import asyncio

import numpy as np

from bench.background_watch import BackgroundWatch
from bench.local_server import LocalServer

EVERY_S = 1.0


class MemoryWatch(BackgroundWatch):
    """Use as ``async with`` around the load. ``samples``: (seconds since the beginning, bytes by process)."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.samples: list[tuple[float, dict[str, int]]] = []

    def growth_mib(self) -> dict[str, float]:
        """By process: what was added between the medians of the second and the last quarter, which leaves out what is
        built up once at the beginning. Empty with fewer than eight samples."""
        if len(self.samples) < 8:
            return {}
        quarter = len(self.samples) // 4
        second, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        return {
            name: round(float(_median(last, name) - _median(second, name)) / 2**20, 2) for name in self.samples[0][1]
        }

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            sizes = await asyncio.to_thread(self._server.memory_bytes)  # reading page tables takes milliseconds
            self.samples.append((clock() - began, sizes))
            await asyncio.sleep(EVERY_S)


def _median(samples: list[tuple[float, dict[str, int]]], name: str) -> float:
    return float(np.median([sizes[name] for _, sizes in samples]))
