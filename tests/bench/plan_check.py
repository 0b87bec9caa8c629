"""A plan beside real servers under a load, with the same arrivals simulated."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.local_server import LocalServer, private_config
from bench.serve.endpoints import GrpcEndpoint
from bench.serve.load import LoadRun, ServeReport
from bench.serve.schedule import endless_requests
from cluster.plan.arrivals import PlannedRequest, read_requests
from cluster.plan.export import fit_request_ms, fit_steps, limits_of, with_request_ms
from cluster.plan.profile import Profile
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from specdec.client.client import Client
from specdec.client.connection import Credentials
from specdec.config import Config
from specdec.control_groups import usable_cores
from specdec.core.types import EngineInfo
from specdec.load.arrivals import Arrivals
from specdec.load.figures import spread
from specdec.load.request import Endpoint, LoadRequest, Record, TimedRequest

LOAD = 0.6  # rate, as a share of the most answers per second of the closed loops
WARM_UP = 4  # requests per replica
DECISIONS, CALIBRATION, LOADED, CAPTURED = "decisions.jsonl", "calibration.jsonl", "loaded.jsonl", "captured"


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Closed loops, from which the profile is made, then Poisson arrivals, which are also simulated with it."""

    replicas: int = 1  # servers, which share this machine's cores
    workload: str = "humaneval"
    levels: tuple[int, ...] = (1, 2, 4, 8)  # concurrent requests per replica of each closed loop
    level_s: float = 6.0  # duration of each closed loop
    duration_s: float = 40.0  # of the Poisson arrivals
    max_tokens: int = 48  # of every answer; stops are ignored, because they delay text, which a plan does not model
    seed: int = 0


class LessBusy:
    """Sends to the endpoint with the fewest running requests, as Envoy does for two replicas."""

    def __init__(self, endpoints: list[GrpcEndpoint]) -> None:
        self._endpoints, self._active = endpoints, [0] * len(endpoints)

    async def send(self, ask: LoadRequest, record: Record) -> None:
        """Send to the less busy endpoint."""
        at = min(range(len(self._active)), key=self._active.__getitem__)
        self._active[at] += 1
        try:
            await self._endpoints[at].send(ask, record)
        finally:
            self._active[at] -= 1

    async def close(self) -> None:
        """Do nothing: the creator of the endpoints closes them."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A load as measured and as simulated."""

    measured: ServeReport
    planned: FleetRun
    profile: Profile  # of the simulation
    rate: float  # requests per second

    def as_dict(self) -> dict[str, Any]:
        """The relative error of the plan, as JSON types."""
        real, plan = self.measured.as_dict(requests=False), self.planned.as_dict()
        off = {
            f"{name}_{q}": round(plan["latency"][name][q] / real["latency"][name][q] - 1, 4)
            for name in ("ttft_ms", "tpot_ms", "e2e_ms")
            for q in ("p50", "p99")
        }
        return {"replicas": plan["replicas"], "rate": round(self.rate, 3), "off": off}


async def check_plan(config: Config, plan: CheckPlan, folder: Path, note: Callable[[str], None]) -> CheckReport:
    """Run the check; the servers write their traces to ``folder``."""
    places = [folder / f"replica-{number}" for number in range(plan.replicas)]
    asks = (ask.of_fixed_length() for ask in endless_requests(plan.workload, plan.max_tokens, note))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(LocalServer(_config(config, place, plan))) for place in places]
        endpoints = [GrpcEndpoint(server.grpc_address, Credentials()) for server in servers]
        for endpoint in endpoints:
            stack.push_async_callback(endpoint.close)
        info = await _info(servers[0])
        balanced = LessBusy(endpoints)
        await LoadRun(balanced).in_turns(asks, 2, WARM_UP * plan.replicas, None)
        began_s = time.time()
        waited_ms, best = await _closed_loops(plan, balanced, asks, note)
        for place in places:
            shutil.copy(place / DECISIONS, place / CALIBRATION)
        rate, split_s = LOAD * best, time.time()
        note(f"{rate:.2f} requests/s for {plan.duration_s:g} s")
        measured = await _open_loop(plan, rate, balanced, asks)
        note(f"measured {len(measured.answered)} answers")
    for place in places:
        _cut(place)
    calibration = _captured(places, began_s, split_s)
    profile = _profile(config, plan, info, places, calibration, waited_ms)
    run = simulate(FleetPlan(profile, plan.replicas, plan.seed), _captured(places, split_s, time.time()))
    return CheckReport(measured, run, profile, rate)


def _config(config: Config, place: Path, plan: CheckPlan) -> Config:
    """The configuration of one server; the servers share the cores evenly."""
    place.mkdir(parents=True)
    threads = config.engine.threads or max(1, usable_cores() // plan.replicas)
    speculation = config.engine.speculation.model_copy(update={"trace_file": place / DECISIONS})
    engine = config.engine.model_copy(update={"speculation": speculation, "threads": threads})
    config = private_config(config)
    server = config.server.model_copy(update={"capture_dir": place / CAPTURED, "capture_prompts": True})
    return config.model_copy(update={"engine": engine, "server": server})


async def _info(server: LocalServer) -> EngineInfo:
    async with Client(server.grpc_address, Credentials()) as client:
        return await client.info(timeout_s=10.0)


async def _closed_loops(
    plan: CheckPlan, endpoint: Endpoint, asks: Iterator[LoadRequest], note: Callable[[str], None]
) -> tuple[float, float]:
    """The median time to first text in ms over all levels, and the most answers per second of a level."""
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
    assert waited_ms, "the servers answered nothing"
    return median(waited_ms), best


async def _open_loop(plan: CheckPlan, rate: float, endpoint: Endpoint, asks: Iterator[LoadRequest]) -> ServeReport:
    offsets = Arrivals(rate, plan.duration_s).offsets(plan.seed)
    run = LoadRun(endpoint)
    await run.on_schedule([TimedRequest(at_s, next(asks)) for at_s in offsets])
    return ServeReport(run)


def _cut(place: Path) -> None:
    """Write to `LOADED` the steps after those of `CALIBRATION`."""
    before = (place / CALIBRATION).read_bytes().count(b"\n")
    head, *lines = (place / DECISIONS).read_bytes().splitlines(keepends=True)
    (place / LOADED).write_bytes(b"".join([head, *lines[before - 1 :]]))


def _captured(places: list[Path], since_s: float, until_s: float) -> list[PlannedRequest]:
    """The requests to all servers in that time, in order."""
    files = [file for place in places for file in (place / CAPTURED).glob("*.jsonl")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    trace = places[0] / "trace.jsonl"
    trace.write_text("\n".join(line for line in lines if since_s <= json.loads(line)["offset_s"] < until_s))
    return read_requests(trace)


def _profile(
    config: Config,
    plan: CheckPlan,
    info: EngineInfo,
    places: list[Path],
    calibration: list[PlannedRequest],
    waited_ms: float,
) -> Profile:
    """The profile, with times from the closed loops.

    waited_ms: time to first text as the client measured it, from which the time outside the engine follows. Yields of
    drafts come from the load's own trace, because they depend on its texts.
    """
    fitted = fit_steps(*(place / CALIBRATION for place in places))
    drafted = fit_steps(*(place / LOADED for place in places))["drafted"]
    profile = Profile(
        target=info.target, limits=limits_of(config.engine, info, config.server), **fitted | {"drafted": drafted}
    )
    fleet = FleetPlan(profile, plan.replicas, plan.seed)
    return with_request_ms(profile, fit_request_ms(fleet, calibration, waited_ms))
