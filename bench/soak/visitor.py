"""One client of a soak: pays one visit after the other."""

from __future__ import annotations

import asyncio

from bench.soak.place import Place
from bench.soak.run_clock import TICK_S, RunClock
from bench.soak.soak_fault import SoakFault
from bench.soak.tally import Tally
from bench.soak.visits import VISITS, Visit, name_of
from bench.soak.within import within

EXCUSED = "cut off while this process was stopped"


class Visitor:
    """Keeps its connections for as long as it stays."""

    def __init__(self, place: Place, tally: Tally, clock: RunClock, hang_s: float) -> None:
        self._place, self._tally, self._clock, self._hang_s = place, tally, clock, hang_s

    async def stay(self, until_s: float) -> None:
        """Pay visits until the clock shows ``until_s``; one that has begun is ended."""
        kinds, weights = list(VISITS), list(VISITS.values())
        try:
            while self._clock.running_s < until_s:
                (visit,) = self._place.random.choices(kinds, weights)
                await self._pay(visit)
        finally:
            await self._place.http.aclose()
            await self._place.client.close()

    async def _pay(self, visit: Visit) -> None:
        name, stops = name_of(visit), self._clock.stops
        try:
            self._tally.add(name, await within(visit(self._place), self._hang_s, "it"))
        except Exception as error:  # an answer that can not be read, a connection that breaks: all of it is a fault
            await asyncio.sleep(2 * TICK_S)  # by then the clock knows whether we were stopped
            if self._clock.stops > stops:
                self._tally.add(name, EXCUSED)
            else:
                told = str(error) if isinstance(error, SoakFault) else f"{type(error).__name__}: {error}"
                self._tally.fault(name, told)
