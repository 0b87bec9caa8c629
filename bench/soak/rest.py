"""Brings a server to rest and looks at it then."""

from __future__ import annotations

import asyncio

from bench.local_server import LocalServer
from bench.soak.look import Look, look
from bench.soak.run_clock import RunClock
from bench.soak.soak_fault import SoakFault

HEARTBEAT_S = 1.2  # what the engine holds is told once a second
LOOK_S = 0.5


async def come_to_rest(server: LocalServer, clock: RunClock, visits: int, limit_s: float) -> Look:
    """The first look at which nothing is held and no file descriptor was closed any more, or the last one within
    ``limit_s`` seconds. Everybody must have left.

    Raises:
        SoakFault: there is no engine to look at, also in the end.
    """
    until_s = clock.running_s + limit_s
    await asyncio.sleep(HEARTBEAT_S)
    before: Look | None = None
    while True:
        over = clock.running_s >= until_s
        try:
            found = await look(server, clock.running_s, visits)
        except SoakFault:
            if over:
                raise
        else:
            if over or (found.at_rest and before is not None and found.files == before.files):
                return found
            before = found
        await asyncio.sleep(LOOK_S)
