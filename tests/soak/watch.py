"""Samples a server during a soak: its processes, open files, resources in use and outcomes of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.local_server import LocalServer
from specdec.errors import SpecdecError


class SoakFault(SpecdecError):  # noqa: N818 - the server's fault, not an error of ours
    """A call hung, failed without a reason or returned part of an answer; the message says which."""


HELD = ("requests_in_flight", "requests_running", "requests_waiting", "kv_pages_used")  # gauges of /metrics


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


def processes_of(server: LocalServer) -> dict[str, psutil.Process]:
    """The front end and the engine of ``server``.

    Raises:
        SoakFault: the engine is gone.
        psutil.Error: the front end is gone.
    """
    children = server.frontend.children()
    engine = next((child for child in children if "server.engine_process" in child.cmdline()), None)
    if engine is None:
        raise SoakFault("the engine's process is gone")
    return {"frontend": server.frontend, "engine": engine}


def memory_bytes(server: LocalServer) -> dict[str, int]:
    """Unique set size (memory that no other process shares) of each process, in bytes."""
    return {name: Use.of(process).own_bytes for name, process in processes_of(server).items()}


@dataclass(frozen=True, slots=True)
class Look:
    """One sample of the server."""

    at_s: float  # seconds of the event loop's clock
    visits: int
    processes: dict[str, Use]
    held: dict[str, int]  # resources that requests hold, by name
    calls: int  # open calls, without the one that samples
    restarts: int

    @property
    def left(self) -> dict[str, int]:
        """The resources still held and the open calls: those counts that are not 0, by name."""
        return {name: count for name, count in {**self.held, "calls": self.calls}.items() if count}

    @property
    def files(self) -> int:
        """File descriptors of all processes."""
        return sum(use.files for use in self.processes.values())


async def look(server: LocalServer, visits: int) -> Look:
    """Sample ``server``, which must have an HTTP port, over a new connection.

    Raises:
        SoakFault: one of its processes is gone or not ready.
    """
    async with httpx.AsyncClient(timeout=None) as http:
        text = (await http.get(f"http://127.0.0.1:{server.http_port}/metrics")).text
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if not sample.labels]
    values = {sample.name.removeprefix("specdec_"): int(sample.value) for sample in samples}
    if not values["engine_ready"]:
        raise SoakFault("the engine is not ready")
    try:
        processes = {name: Use.of(process) for name, process in processes_of(server).items()}
    except psutil.Error as error:
        raise SoakFault(f"a process of the server is gone: {error}") from None
    held = {name: values[name] for name in HELD}
    now_s = asyncio.get_running_loop().time()
    return Look(now_s, visits, processes, held, values["calls_open"] - 1, values["engine_restarts_total"])


HEARTBEAT_S = 1.2  # the engine reports its load once a second
REST_POLL_S = 0.5


async def come_to_rest(server: LocalServer, visits: int, limit_s: float) -> Look:
    """The first sample in which nothing is held and the number of open files no longer changes, or the last one within
    ``limit_s`` seconds. All clients must have left.

    Raises:
        SoakFault: a process of the server is still gone or not ready at the end.
    """
    clock = asyncio.get_running_loop().time
    until_s = clock() + limit_s
    await asyncio.sleep(HEARTBEAT_S)
    before: Look | None = None
    while True:
        over = clock() >= until_s
        try:
            found = await look(server, visits)
        except SoakFault:
            if over:
                raise
        else:
            if over or (not found.left and before is not None and found.files == before.files):
                return found
            before = found
        await asyncio.sleep(REST_POLL_S)


_MESSAGES = 50


class Tally:
    """Outcomes of the visits."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()  # by visit and outcome
        self.faults: Counter[str] = Counter()  # by message, for the first `_MESSAGES` different ones
        self.n_faults = 0

    @property
    def visits(self) -> int:
        """Number of visits."""
        return self.outcomes.total()

    def add(self, visit: str, outcome: str) -> None:
        """Count a visit."""
        self.outcomes[visit, outcome] += 1

    def fault(self, visit: str, message: str) -> None:
        """Count a visit with a fault."""
        self.add(visit, "fault")
        self.n_faults += 1
        line = f"{visit}: {message}"
        if line in self.faults or len(self.faults) < _MESSAGES:
            self.faults[line] += 1

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Counts by visit and outcome."""
        found: dict[str, dict[str, int]] = {}
        for (visit, outcome), count in sorted(self.outcomes.items()):
            found.setdefault(visit, {})[outcome] = count
        return found
