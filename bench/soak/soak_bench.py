"""A soak: mixed load on a server of our own in shifts, observed between them, and what that amounts to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx
import numpy as np

from bench.local_server import LocalServer
from bench.soak.visits import VISITS, Place, Visit, name_of, outcome_of
from bench.soak.watch import TICK_S, Look, RunningTime, SoakFault, Tally, Use, come_to_rest, within
from bench.workloads.workload import long_text
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.config import Config
from specdec.core.types import SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """``clients`` visit the server for ``minutes``, in shifts of ``shift_s`` seconds; after each they leave, and the
    server is looked at. Time in which this process was stopped does not count.

    ``hang_s``: what has not ended by then never will. ``rest_s``: how long the server may take to come to rest once
    everybody has left. The first ``warm_up`` of all looks are not judged for growth: until then memory is taken once.
    ``growth_mib``: how much a process may grow over the judged looks, in addition to ``growth_share`` of its size.
    """

    minutes: float = 60.0
    clients: int = 12
    shift_s: float = 60.0
    seed: int = 0
    hang_s: float = 300.0
    rest_s: float = 90.0
    warm_up: float = 1 / 3
    growth_mib: float = 8.0
    growth_share: float = 0.02


EXCUSED = "cut off while this process was stopped"


class Visitor:
    """Keeps its connections for as long as it stays."""

    def __init__(self, place: Place, tally: Tally, clock: RunningTime, hang_s: float) -> None:
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
            self._tally.add(name, await within(outcome_of(visit, self._place), self._hang_s, "it"))
        except Exception as error:  # an answer that can not be read, a connection that breaks: all of it is a fault
            await asyncio.sleep(2 * TICK_S)  # by then the clock knows whether we were stopped
            if self._clock.stops > stops:
                self._tally.add(name, EXCUSED)
            else:
                text = str(error) if isinstance(error, SoakFault) else f"{type(error).__name__}: {error}"
                self._tally.fault(name, text)


LEAST = 6


def slope(times: Seq[float], values: Seq[float]) -> float | None:
    """Theil-Sen: the median of the slopes of all pairs, per unit of time, which a few odd values do not move (Sen 1968,
    doi 10.1080/01621459.1968.10480934). None for fewer than `LEAST` values."""
    if len(times) < LEAST:
        return None
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    i, j = np.triu_indices(len(t), 1)
    return float(np.median((v[j] - v[i]) / (t[j] - t[i])))


MIB = 1 << 20
SPARE = 2  # threads and descriptors that one half of the looks may have over the other


@dataclass(frozen=True, slots=True)
class SoakReport:
    """``looks``: one per shift, at rest. ``answers``: what the same prompt was answered after each."""

    plan: SoakPlan
    tally: Tally
    looks: Seq[Look]
    answers: Seq[str]
    stops: int

    @property
    def judged(self) -> Seq[Look]:
        """The looks after the warm-up."""
        return self.looks[math.ceil(len(self.looks) * self.plan.warm_up) :]

    def growth(self, process: str) -> dict[str, float] | None:
        """MiB that ``process`` grew from the first judged look to the last, and per hour, by the fitted slope, and what
        it may; None with too few looks."""
        looks = self.judged
        per_s = slope([one.at_s for one in looks], [one.processes[process].own_bytes for one in looks])
        if per_s is None:
            return None
        size = looks[-1].processes[process].own_bytes
        return {
            "mib": round(per_s * (looks[-1].at_s - looks[0].at_s) / MIB, 3),
            "mib_per_hour": round(per_s * 3600 / MIB, 3),
            "limit_mib": round(self.plan.growth_mib + self.plan.growth_share * size / MIB, 3),
            "size_mib": round(size / MIB, 1),
        }

    def faults(self) -> list[str]:
        """Every fault found; empty for a server that passes."""
        found = [f"{count} x {line}" for line, count in self.tally.faults.most_common()]
        for number, one in enumerate(self.looks, 1):
            if not one.at_rest:
                found.append(f"look {number}: no client was connected, but {one.left} were still held")
            if one.restarts:
                found.append(f"look {number}: the engine had been restarted {one.restarts} times")
        if len(set(self.answers)) > 1:
            found.append(f"one prompt was answered in {len(set(self.answers))} ways: {sorted(set(self.answers))[:3]}")
        for process in ("frontend", "engine"):
            found += self._creep(process)
        return found

    def _creep(self, process: str) -> list[str]:
        grown = self.growth(process)
        found = []
        if grown is not None and grown["mib"] > grown["limit_mib"]:
            found.append(f"{process}: memory grew by {grown['mib']} MiB after the warm-up, over {grown['limit_mib']}")
        half = len(self.judged) // 2
        for name in ("files", "threads"):
            first, second = (
                max((_count(one.processes[process], name) for one in part), default=0)
                for part in (self.judged[:half], self.judged[half:])
            )
            if half and second > first + SPARE:
                found.append(f"{process}: {name} at rest went from {first} to {second}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: every figure."""
        faults = self.faults()
        return {
            "ok": not faults, "faults": faults, "minutes": self.plan.minutes, "clients": self.plan.clients,
            "visits": self.tally.visits, "outcomes": self.tally.as_dict(), "stops": self.stops,
            "answer": self.answers[0] if self.answers else None,
            "growth": {process: self.growth(process) for process in ("frontend", "engine")},
            "looks": [_row(one) for one in self.looks],
        }  # fmt: skip


def _count(use: Use, name: str) -> int:
    found: int = getattr(use, name)
    return found


def _row(one: Look) -> dict[str, Any]:
    found: dict[str, Any] = {"minute": round(one.at_s / 60, 2), "visits": one.visits, **one.held, "calls": one.calls}
    for name, use in one.processes.items():
        found |= {
            f"{name}_mib": round(use.own_bytes / MIB, 1), f"{name}_files": use.files, f"{name}_threads": use.threads,
        }  # fmt: skip
    return found


CANARY, CANARY_TOKENS = "def fibonacci(n):\n", 24
_ONCE = RetryPolicy(attempts=1)


async def run_soak(config: Config, plan: SoakPlan, seen: Callable[[Look, Tally], None]) -> SoakReport:
    """``config`` must have an HTTP port. ``seen`` is shown every look as it is taken, and the tally until then.

    Raises:
        ChildServerError: the server did not start.
    """
    tally, looks, answers = Tally(), list[Look](), list[str]()
    whole_s = plan.minutes * 60
    async with LocalServer(config) as server, RunningTime() as clock:
        shift = 0
        while shift == 0 or clock.running_s < whole_s:
            shift += 1
            await _shift(server, plan, tally, clock, shift, min(clock.running_s + plan.shift_s, whole_s))
            try:
                answers.append(await within(_canary(server), plan.hang_s, "the answer"))
                looks.append(await come_to_rest(server, clock, tally.visits, plan.rest_s))
            except (CallError, SoakFault) as error:
                tally.fault("look", str(error))
            else:
                seen(looks[-1], tally)
        return SoakReport(plan, tally, looks, answers, clock.stops)


async def _shift(
    server: LocalServer, plan: SoakPlan, tally: Tally, clock: RunningTime, shift: int, until_s: float
) -> None:
    """All visitors, until the clock shows ``until_s`` and each has ended what it began."""
    text = long_text()
    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.clients):
            place = Place(
                number,
                Client(server.grpc_address, Credentials(), _ONCE),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=None),
                server.grpc_port,
                server.http_port,
                text,
                Random(f"{plan.seed}/{shift}/{number}"),
            )
            tasks.create_task(Visitor(place, tally, clock, plan.hang_s).stay(until_s))


async def _canary(server: LocalServer) -> str:
    """A greedy answer, which must be the same each time."""
    async with Client(server.grpc_address, Credentials(), _ONCE) as client:
        stopping = StoppingParams(max_tokens=CANARY_TOKENS, ignore_eos=True)
        answer = await client.generate(CANARY, sampling=SamplingParams(temperature=0.0), stopping=stopping)
        return answer.samples[0].text
