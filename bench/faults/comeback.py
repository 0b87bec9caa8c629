"""Times how an engine comes back."""

from __future__ import annotations

import asyncio

import psutil

from bench.local_server import LocalServer
from bench.soak.soak_fault import SoakFault
from specdec.client import CallError, Client
from specdec.types import StoppingParams

_POLL_S = 0.02


class Comeback:
    """``old``: the process id of the engine that runs now."""

    def __init__(self, server: LocalServer, client: Client) -> None:
        self._server, self._client = server, client
        self.old = server.engine.pid

    async def wait(self, began_s: float, at: float, limit_s: float) -> tuple[float, float]:
        """Seconds that the next engine loaded, from its process's begin until requests were taken, and seconds from the
        fault until one was answered. The fault was at ``began_s`` of the event loop's clock, ``at`` of Unix time.

        Raises:
            SoakFault: no request is answered within ``limit_s`` seconds.
        """
        clock = asyncio.get_running_loop().time
        born: float | None = None
        refused_s = began_s
        while clock() < began_s + limit_s:
            born = self._born() if born is None else born
            tried_s = clock()
            try:
                await self._client.generate("a", stopping=StoppingParams(max_tokens=1))
            except CallError:
                refused_s = tried_s
            else:
                if born is not None:
                    return max(0.0, at + (refused_s - began_s) - born), clock() - began_s
            await asyncio.sleep(_POLL_S)
        raise SoakFault(f"no answer within {limit_s:g} s of the fault")

    def _born(self) -> float | None:
        """When the next engine's process was started, in Unix time; None: there is none yet."""
        try:
            engine = self._server.engine
            return engine.create_time() if engine.pid != self.old else None
        except (psutil.Error, StopIteration):
            return None
