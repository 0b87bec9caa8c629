"""Samples a server during a soak: its processes, open files, resources in use and outcomes of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.local_server import BackgroundWatch, LocalServer
from specdec.errors import SpecdecError


class SoakFault(SpecdecError):  # noqa: N818 - the server's fault, not an error of ours
    """A call hung, failed without a reason or returned part of an answer; the message says which."""


HELD = ("requests_in_flight", "requests_running", "requests_waiting", "kv_pages_used")


@dataclass(frozen=True, slots=True)
class Use:
    """Resources that one process uses."""

    own_bytes: int  # unique set size
    files: int  # open file descriptors
    threads: int

    @staticmethod
    def of(process: psutil.Process) -> Use:
        """Measures ``process`` now."""
        return Use(int(process.memory_full_info().uss), process.num_fds(), process.num_threads())


@dataclass(frozen=True, slots=True)
class Look:
    """One sample of the server."""

    at_s: float  # seconds of running time
    visits: int
    processes: dict[str, Use]
    held: dict[str, int]  # resources that requests hold, by name
    calls: int  # open calls, without the one that samples
    restarts: int

    @property
    def at_rest(self) -> bool:
        """Whether no request holds a resource and no call is open."""
        return not self.left

    @property
    def left(self) -> dict[str, int]:
        """The resources still held and the open calls: those counts that are not 0, by name."""
        return {name: count for name, count in {**self.held, "calls": self.calls}.items() if count}

    @property
    def files(self) -> int:
        """File descriptors of all processes."""
        return sum(use.files for use in self.processes.values())


async def look(server: LocalServer, at_s: float, visits: int) -> Look:
    """Look at ``server``, which must have an HTTP port, over a connection of our own.

    Raises:
        SoakFault: a process of it is not there, or not ready.
    """
    async with httpx.AsyncClient(timeout=None) as http:
        text = (await http.get(f"http://127.0.0.1:{server.http_port}/metrics")).text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if not sample.labels]
    values = {sample.name.removeprefix("specdec_"): int(sample.value) for sample in samples}
    if not values["engine_ready"]:
        raise SoakFault("the engine is not ready")
    try:
        processes = {"frontend": Use.of(server.frontend), "engine": Use.of(server.engine)}
    except (psutil.Error, RuntimeError) as error:
        raise SoakFault(f"a process of the server is gone: {error}") from None
    held = {name: values[name] for name in HELD}
    return Look(at_s, visits, processes, held, values["calls_open"] - 1, values["engine_restarts_total"])


TICK_S = 0.5
STOPPED_S = 5.0  # between two ticks: more than a busy machine makes of one


class RunningTime(BackgroundWatch):
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


HEARTBEAT_S = 1.2  # the engine reports its load once a second
REST_POLL_S = 0.5


async def come_to_rest(server: LocalServer, clock: RunningTime, visits: int, limit_s: float) -> Look:
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
        await asyncio.sleep(REST_POLL_S)


_MESSAGES = 50


class Tally:
    """``outcomes``: by visit and outcome. ``faults``: messages, the first `_MESSAGES` kinds of them; ``n_faults``: all
    of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: Counter[str] = Counter()
        self.n_faults = 0

    @property
    def visits(self) -> int:
        """Number of them."""
        return self.outcomes.total()

    def add(self, visit: str, outcome: str) -> None:
        """One visit ended."""
        self.outcomes[visit, outcome] += 1

    def fault(self, visit: str, message: str) -> None:
        """One visit met a fault."""
        self.add(visit, "fault")
        self.n_faults += 1
        line = f"{visit}: {message}"
        if line in self.faults or len(self.faults) < _MESSAGES:
            self.faults[line] += 1

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Outcomes by visit."""
        found: dict[str, dict[str, int]] = {}
        for (visit, outcome), count in sorted(self.outcomes.items()):
            found.setdefault(visit, {})[outcome] = count
        return found


WITHIN_POLL_S = 1.0
Result = TypeVar("Result")


async def within(work: Coroutine[Any, Any, Result], limit_s: float, what: str) -> Result:
    """The result of ``work``, looked at once a second; where the process is stopped meanwhile, that is one look.

    Raises:
        SoakFault: ``what`` did not end in ``limit_s`` seconds; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    left_s = limit_s
    try:
        while not task.done():
            if left_s <= 0:
                raise SoakFault(f"{what} did not end within {limit_s:g} s")
            await asyncio.wait([task], timeout=min(WITHIN_POLL_S, left_s))
            left_s -= WITHIN_POLL_S
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=WITHIN_POLL_S)
