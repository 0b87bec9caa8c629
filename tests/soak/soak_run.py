"""A soak: mixed load on a server in shifts, a sample of the server at rest after each, and the faults found."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

import httpx
from scipy.stats import theilslopes  # type: ignore[import-untyped]

from bench.local_server import LocalServer
from bench.workloads.workload import long_text
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.config import Config
from specdec.core.types import SamplingParams, StoppingParams
from tests.soak.visits import VISITS, Place, Visit, name_of, outcome_of
from tests.soak.watch import Look, SoakFault, Tally, come_to_rest


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The load of a soak, and what the server may hold and grow."""

    minutes: float = 60.0
    clients: int = 12
    shift_s: float = 60.0  # duration of a shift; then all clients leave, and the server is sampled
    seed: int = 0
    hang_s: float = 300.0  # a call that takes longer hangs
    rest_s: float = 90.0  # time in which the server must come to rest after a shift
    warm_up: float = 1 / 3  # share of the samples at the beginning that are not judged for growth
    growth_mib: float = 8.0  # a process may grow by this
    growth_share: float = 0.02  # and by this share of its size


class Visitor:
    """A client that pays visits over the same connections for a whole shift."""

    def __init__(self, place: Place, tally: Tally, hang_s: float) -> None:
        self._place, self._tally, self._hang_s = place, tally, hang_s

    async def stay(self, until_s: float) -> None:
        """Pay one visit, and more until ``until_s`` of the event loop's clock."""
        kinds, weights = list(VISITS), list(VISITS.values())
        clock = asyncio.get_running_loop().time
        try:
            while True:
                (visit,) = self._place.random.choices(kinds, weights)
                await self.pay(visit)
                if clock() >= until_s:
                    return
        finally:
            await self._place.http.aclose()
            await self._place.client.close()

    async def pay(self, visit: Visit) -> None:
        """Pay one visit and count its outcome."""
        name = name_of(visit)
        try:
            async with asyncio.timeout(self._hang_s):
                self._tally.add(name, await outcome_of(visit, self._place))
        except TimeoutError:
            self._tally.fault(name, f"it did not end within {self._hang_s:g} s")
        except SoakFault as fault:
            self._tally.fault(name, str(fault))
        except Exception as error:  # an invalid answer or a broken connection is a fault of the server
            self._tally.fault(name, f"{type(error).__name__}: {error}")


LEAST = 6  # samples; fewer give no slope
MIB = 1 << 20
SPARE = 2  # threads and descriptors by which the second half of the samples may exceed the first


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What a soak found."""

    plan: SoakPlan
    tally: Tally
    looks: Seq[Look]  # one per shift, at rest
    answers: Seq[str]  # to the same prompt, one per shift

    @property
    def judged(self) -> Seq[Look]:
        """The samples after the warm-up."""
        return self.looks[math.ceil(len(self.looks) * self.plan.warm_up) :]

    def growth(self, process: str) -> dict[str, float] | None:
        """Growth of ``process`` over the judged samples in MiB and per hour, its size, and the growth allowed.

        The slope is Theil and Sen's: the median of the slopes of all pairs, robust against outliers. None for fewer
        than `LEAST` samples.
        """
        looks = self.judged
        if len(looks) < LEAST:
            return None
        fit = theilslopes([one.processes[process].own_bytes for one in looks], [one.at_s for one in looks])
        per_s, size = float(fit.slope), looks[-1].processes[process].own_bytes
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
            if one.left:
                found.append(f"shift {number}: all clients had left, but {one.left} were still held")
            if one.restarts:
                found.append(f"shift {number}: the engine had restarted {one.restarts} times")
        if len(set(self.answers)) > 1:
            found.append(f"one prompt had {len(set(self.answers))} different answers: {sorted(set(self.answers))[:3]}")
        for process in ("frontend", "engine"):
            found += self._growth_faults(process)
        return found

    def _growth_faults(self, process: str) -> list[str]:
        grown = self.growth(process)
        found = []
        if grown is not None and grown["mib"] > grown["limit_mib"]:
            found.append(f"{process}: memory grew by {grown['mib']} MiB after the warm-up, over {grown['limit_mib']}")
        half = len(self.judged) // 2
        for name in ("files", "threads"):
            counts: list[int] = [getattr(one.processes[process], name) for one in self.judged]
            if half and max(counts[half:]) > max(counts[:half]) + SPARE:
                found.append(f"{process}: {name} at rest grew from {max(counts[:half])} to {max(counts[half:])}")
        return found


CANARY, CANARY_TOKENS = "def fibonacci(n):\n", 24
_ONCE = RetryPolicy(attempts=1)


async def run_soak(config: Config, plan: SoakPlan, seen: Callable[[Look, Tally], None]) -> SoakReport:
    """Run a soak on a new server. ``config`` must have an HTTP port; ``seen`` receives each sample and the tally.

    Raises:
        ChildServerError: the server did not start.
    """
    tally, looks, answers = Tally(), list[Look](), list[str]()
    clock = asyncio.get_running_loop().time
    async with LocalServer(config) as server:
        end_s, shift = clock() + plan.minutes * 60, 0
        while shift == 0 or clock() < end_s:
            shift += 1
            await _shift(server, plan, tally, shift, min(clock() + plan.shift_s, end_s))
            try:
                async with asyncio.timeout(plan.hang_s):
                    answers.append(await _canary(server))
                looks.append(await come_to_rest(server, tally.visits, plan.rest_s))
            except (CallError, SoakFault, TimeoutError) as error:
                tally.fault("look", str(error) or f"no answer within {plan.hang_s:g} s")
            else:
                seen(looks[-1], tally)
        return SoakReport(plan, tally, looks, answers)


async def _shift(server: LocalServer, plan: SoakPlan, tally: Tally, shift: int, until_s: float) -> None:
    """Let all visitors stay until ``until_s``."""
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
            tasks.create_task(Visitor(place, tally, plan.hang_s).stay(until_s))


async def _canary(server: LocalServer) -> str:
    """A greedy answer, which must always be the same."""
    async with Client(server.grpc_address, Credentials(), _ONCE) as client:
        stopping = StoppingParams(max_tokens=CANARY_TOKENS, ignore_eos=True)
        answer = await client.generate(CANARY, sampling=SamplingParams(temperature=0.0), stopping=stopping)
        return answer.samples[0].text
