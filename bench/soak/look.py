"""What a server holds, as it and the system tell."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.local_server import LocalServer
from bench.soak.soak_fault import SoakFault

HELD = ("requests_in_flight", "requests_running", "requests_waiting", "kv_pages_used")


@dataclass(frozen=True, slots=True)
class Use:
    """One process: bytes that are its own, open file descriptors, threads."""

    own_bytes: int
    files: int
    threads: int

    @staticmethod
    def of(process: psutil.Process) -> Use:
        """Of ``process`` now."""
        return Use(int(process.memory_full_info().uss), process.num_fds(), process.num_threads())


@dataclass(frozen=True, slots=True)
class Look:
    """``at_s`` of running time. ``held``: what belongs to requests. ``calls``: open ones beside that which asks."""

    at_s: float
    visits: int
    processes: dict[str, Use]
    held: dict[str, int]
    calls: int
    restarts: int

    @property
    def at_rest(self) -> bool:
        """Whether nothing is held for anybody."""
        return not self.left

    @property
    def left(self) -> dict[str, int]:
        """What is held, by name."""
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
    values = {sample.name.removeprefix("specdec:"): int(sample.value) for sample in samples}
    if not values["engine_ready"]:
        raise SoakFault("the engine is not ready")
    try:
        processes = {"frontend": Use.of(server.frontend), "engine": Use.of(server.engine)}
    except (psutil.Error, RuntimeError) as error:
        raise SoakFault(f"a process of the server is gone: {error}") from None
    held = {name: values[name] for name in HELD}
    return Look(at_s, visits, processes, held, values["calls_open"] - 1, values["engine_restarts_total"])
