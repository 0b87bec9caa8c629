"""A plan against what it plans: real servers under a load, and the same arrivals simulated."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from bench.local_server import LocalServer
from bench.serve.endpoints import GrpcEndpoint
from bench.serve.load import LoadRun, ServeReport
from bench.serve.schedule import endless_asks
from cluster.plan.arrivals import PlannedRequest, read_requests
from cluster.plan.export import fit_request_ms, fit_steps, limits_of, with_request_ms
from cluster.plan.profile import Profile
from cluster.plan.routing import ROUND_ROBIN
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from server.observe.capture import make_trace, read_entries
from specdec.client.client import Client
from specdec.client.connection import Credentials
from specdec.config import Config
from specdec.core.types import EngineInfo
from specdec.errors import SpecdecError
from specdec.load.arrivals import Arrivals
from specdec.load.figures import spread
from specdec.load.request import Endpoint, LoadRequest, Record, TimedRequest

LOAD = 0.6  # of the most answers per second that were seen, where no rate is given
WARM_UP = 4
DECISIONS, CALIBRATION, LOADED, CAPTURED = "decisions.jsonl", "calibration.jsonl", "loaded.jsonl", "captured"


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """``replicas`` servers on this machine, which share its cores. First closed loops of each of ``levels`` at once,
    ``level_s`` seconds each, from which the profile is made; then Poisson arrivals of ``rate`` requests per second
    (None: `LOAD` of what the loops reached) for ``duration_s``, which are planned with it. Every answer has
    ``max_tokens``: text that is held back for a stop, which no plan knows of, would come late."""

    replicas: int = 1
    workload: str = "humaneval"
    levels: tuple[int, ...] = (1, 2, 4, 8)
    level_s: float = 6.0
    rate: float | None = None
    duration_s: float = 40.0
    max_tokens: int = 48
    seed: int = 0


class InTurns:
    """Endpoints one after the other, as a router does that knows nothing of load."""

    def __init__(self, endpoints: list[GrpcEndpoint]) -> None:
        self._next = cycle(endpoints)

    async def send(self, ask: LoadRequest, record: Record) -> None:
        """To the next one."""
        await next(self._next).send(ask, record)

    async def close(self) -> None:
        """They are closed by who made them."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """``measured``: the load as the generator saw it; ``planned``: as the simulation did, from ``profile``."""

    measured: ServeReport
    planned: FleetRun
    profile: Profile
    rate: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: both, and by how much the plan is off, of what was measured."""
        real, plan = self.measured.as_dict(requests=False), self.planned.as_dict()
        off = {
            f"{name}_{q}": round(plan["latency"][name][q] / real["latency"][name][q] - 1, 4)
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
            for q in ("p50", "p99")
        }
        names = ("valid", "faults", "requests", "latency", "throughput")
        return {
            "replicas": plan["replicas"], "rate": round(self.rate, 3), "off": off,
            "measured": {name: real[name] for name in names}, "planned": plan,
            "overheads": self.profile.overheads.model_dump(), "tokens_per_step": round(self.profile.tokens_per_step, 3),
            "measured_tokens_per_step": real.get("tokens_per_step"),
        }  # fmt: skip


async def check_plan(config: Config, plan: CheckPlan, folder: Path, note: Callable[[str], None]) -> CheckReport:
    """Run it; ``folder`` gets the servers' traces.

    Raises:
        ChildServerError: a server did not start.
        SpecdecError: it answers nothing, or too little to be planned from.
    """
    places = [folder / f"replica-{number}" for number in range(plan.replicas)]
    asks = (ask.of_fixed_length() for ask in endless_asks(plan.workload, plan.max_tokens, note))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(LocalServer(_config(config, place, plan))) for place in places]
        endpoints = [GrpcEndpoint(server.grpc_address, Credentials()) for server in servers]
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.close)
        info = await _info(servers[0])
        balanced = InTurns(endpoints)
        await LoadRun(balanced).in_turns(asks, 2, WARM_UP * plan.replicas, None)
        began_s = time.time()
        waited_ms, best = await _closed_loops(plan, balanced, asks, note)
        for place in places:
            shutil.copy(place / DECISIONS, place / CALIBRATION)
        rate, split_s = plan.rate or LOAD * best, time.time()
        note(f"{rate:.2f} requests/s for {plan.duration_s:g} s")
        measured = await _open_loop(plan, rate, balanced, asks)
        note(f"measured {len(measured.answered)} answers")
    for place in places:
        _cut(place)
    calibration = _captured(places, began_s, split_s)
    profile = _profile(config, plan, info, places, calibration, waited_ms)
    run = simulate(FleetPlan(profile, plan.replicas, ROUND_ROBIN, plan.seed), _captured(places, split_s, time.time()))
    return CheckReport(measured, run, profile, rate)


def _config(config: Config, place: Path, plan: CheckPlan) -> Config:
    """Of one of the servers; each has as many of the cores."""
    place.mkdir(parents=True)
    threads = config.engine.threads or max(1, len(os.sched_getaffinity(0)) // plan.replicas)
    speculation = config.engine.speculation.model_copy(update={"trace_file": place / DECISIONS})
    engine = config.engine.model_copy(update={"speculation": speculation, "threads": threads})
    faces = {"grpc_port": 0, "http_port": None, "capture_dir": place / CAPTURED, "capture_prompts": True}
    return config.model_copy(update={"engine": engine, "server": config.server.model_copy(update=faces)})


async def _info(server: LocalServer) -> EngineInfo:
    async with Client(server.grpc_address, Credentials()) as client:
        return await client.info(timeout_s=10.0)


async def _closed_loops(
    plan: CheckPlan, endpoint: Endpoint, asks: Iterator[LoadRequest], note: Callable[[str], None]
) -> tuple[float, float]:
    """The median time to first text over all levels, and the most answers per second of any."""
    waited_ms: list[float] = []
    best = 0.0
    for level in plan.levels:
        run = LoadRun(endpoint)
        await run.in_turns(asks, level * plan.replicas, None, plan.level_s)
        report = ServeReport(run)
        found = [record.ttft_ms for record in report.answered]
        rate = len(found) / report.duration_s
        note(f"{level * plan.replicas} at once: {rate:.2f} answers/s, TTFT p50 {spread(found).get('p50')} ms")
        waited_ms += found
        best = max(best, rate)
    if not waited_ms:
        raise SpecdecError("check: the server answered nothing; see its log")
    return median(waited_ms), best


async def _open_loop(plan: CheckPlan, rate: float, endpoint: Endpoint, asks: Iterator[LoadRequest]) -> ServeReport:
    offsets = Arrivals(rate, plan.duration_s).offsets(plan.seed)
    run = LoadRun(endpoint)
    await run.on_schedule([TimedRequest(at_s, next(asks)) for at_s in offsets])
    return ServeReport(run)


def _cut(place: Path) -> None:
    """Leave in `LOADED` the steps that came after those of `CALIBRATION`."""
    before = (place / CALIBRATION).read_bytes().count(b"\n")
    head, *lines = (place / DECISIONS).read_bytes().splitlines(keepends=True)
    (place / LOADED).write_bytes(b"".join([head, *lines[before - 1 :]]))


def _captured(places: list[Path], since_s: float, until_s: float) -> list[PlannedRequest]:
    """What came to all servers in that time, in order."""
    entries = [entry for place in places for entry in read_entries(place / CAPTURED)]
    trace = places[0] / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in make_trace(entries, since_s, until_s)))
    return read_requests(trace)


def _profile(
    config: Config,
    plan: CheckPlan,
    info: EngineInfo,
    places: list[Path],
    calibration: list[PlannedRequest],
    waited_ms: float,
) -> Profile:
    """Times are those of the closed loops; what requests wait outside the engine is known here from the caller's side.
    What drafts brought is of the load's own trace: it depends on the texts, and on how many there were before to draft
    from, as arrivals and lengths are the load's own."""
    fitted = fit_steps(*(place / CALIBRATION for place in places))
    drafted = fit_steps(*(place / LOADED for place in places)).drafted
    profile = Profile(
        target=info.target, limits=limits_of(config.engine, info, config.server), verify=fitted.verify,
        noise=fitted.noise, drafted=drafted, overheads=fitted.overheads,
    )  # fmt: skip
    fleet = FleetPlan(profile, plan.replicas, ROUND_ROBIN, plan.seed)
    return with_request_ms(profile, fit_request_ms(fleet, calibration, waited_ms))
