"""Measures the peak goodput of a server, and its goodput at several times the load it can serve."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.local_server import BackgroundWatch, LocalServer
from bench.serve.endpoints import GrpcEndpoint
from bench.serve.load import MAX_SLIP_MS, LoadRun, ServeReport
from bench.serve.schedule import endless_asks
from specdec.client.connection import Credentials
from specdec.config import Config
from specdec.load.arrivals import Arrivals
from specdec.load.request import LoadRequest, Objective, TimedRequest


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """Peak: closed loops of each of ``levels`` at once, ``peak_s`` seconds each after ``settle_s`` that do not count.
    Then Poisson arrivals at ``factor`` times the answers per second found, for ``minutes``. The prompts go on from one
    part to the next, so none comes twice; every answer has ``max_tokens`` tokens: how much work a request is must not
    depend on which ones come.

    ``objectives`` empty: `ROOM` times what whole answers took at the p99 of the least level that is at the peak, give
    or take `KNEE`. ``deadline_s`` goes with every request of the overload, so that the server may refuse what can not
    be done by then; None: the objective of whole answers.
    """

    workload: str = "humaneval"
    levels: tuple[int, ...] = (4, 8, 16, 32)  # concurrent requests of each closed loop
    peak_s: float = 30.0  # seconds that count at each level
    settle_s: float = 8.0  # seconds before them, which do not count
    factor: float = 4.0  # arrival rate of the overload over the peak rate
    minutes: float = 3.0  # duration of the overload
    max_tokens: int = 32
    deadline_s: float | None = None
    objectives: tuple[Objective, ...] = ()
    seed: int = 0


def goodput(report: ServeReport, objectives: Seq[Objective], begin_s: float, end_s: float) -> float:
    """Per second between two times of the run's clock: tokens that came then, of requests that were answered within all
    ``objectives``. Counted as they come, and not with the whole answer, for those that run together end together: how
    many ends fall between two times is chance."""
    good = (record for record in report.answered if all(limit.kept_by(record) for limit in objectives))
    tokens = sum(
        count
        for record in good
        for at_s, count in zip(record.chunk_s, record.chunk_tokens, strict=True)
        if begin_s <= at_s < end_s
    )
    return tokens / max(1e-9, end_s - begin_s)


KNEE = 0.05  # a level is at the peak if its rate is within this fraction of the best


@dataclass(frozen=True, slots=True)
class Level:
    """``report`` of a closed loop with ``at_once``; what counts lies between ``begin_s`` and ``end_s`` of its clock."""

    at_once: int
    report: ServeReport
    begin_s: float
    end_s: float

    def tokens_per_s(self, objectives: Seq[Objective] = ()) -> float:
        """Tokens of answers that kept ``objectives``."""
        return goodput(self.report, objectives, self.begin_s, self.end_s)

    @property
    def requests_per_s(self) -> float:
        """Answers, as many as those tokens are."""
        answered = self.report.answered
        mean = sum(sum(record.chunk_tokens) for record in answered) / max(1, len(answered))
        return self.tokens_per_s() / mean if mean else 0.0


def knee_of(levels: Seq[Level]) -> Level:
    """The lowest level at the peak: higher levels add waiting time and no throughput."""
    best = max(level.tokens_per_s() for level in levels)
    return min(
        (level for level in levels if level.tokens_per_s() >= (1 - KNEE) * best), key=lambda level: level.at_once
    )


EVERY_S = 1.0


class MemoryWatch(BackgroundWatch):
    """Use as ``async with`` around the load. ``samples``: (seconds since the beginning, bytes by process)."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.samples: list[tuple[float, dict[str, int]]] = []

    def growth_mib(self) -> dict[str, float]:
        """By process: what was added between the medians of the second and the last quarter, which leaves out what is
        built up once at the beginning. Empty with fewer than eight samples."""
        if len(self.samples) < 8:
            return {}
        quarter = len(self.samples) // 4
        second, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        return {
            name: round(float(_median(last, name) - _median(second, name)) / 2**20, 2) for name in self.samples[0][1]
        }

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            sizes = await asyncio.to_thread(self._server.memory_bytes)  # reading page tables takes milliseconds
            self.samples.append((clock() - began, sizes))
            await asyncio.sleep(EVERY_S)


def _median(samples: list[tuple[float, dict[str, int]]], name: str) -> float:
    return float(np.median([sizes[name] for _, sizes in samples]))


ROOM = 2.0  # the objective where none is given: so many times the p99 of the least level at the peak
SLIP = 0.02  # of the deadline that the generator may be late
_TIMEOUT_S = 300.0
_WARM_UP = 8


async def measure_overload(
    config: Config, plan: OverloadPlan, note: Callable[[str], None], **server: str
) -> dict[str, Any]:
    """JSON-able figures: the peak, what is left of it under overload, refusals, admitted requests' times, memory.
    ``server``: as `LocalServer` takes it.

    Raises:
        ChildServerError: the server did not start.
        SpecdecError: it answers nothing.
    """
    asks = (ask.of_fixed_length() for ask in endless_asks(plan.workload, plan.max_tokens, note))
    async with LocalServer(config, **server) as running:
        await _closed(running, plan, asks, 2, count=_WARM_UP)
        levels = []
        for at_once in plan.levels:
            levels.append(await _closed(running, plan, asks, at_once))
            note(f"{at_once} at once: {levels[-1].tokens_per_s():.1f} tokens/s")
        knee = knee_of(levels)
        objectives = plan.objectives or objectives_of(knee.report)
        rate = knee.requests_per_s
        told = ", ".join(str(limit) for limit in objectives)
        note(f"peak {rate:.2f} requests/s from {knee.at_once} at once on; now {plan.factor:g} times that, {told}")
        before = running.memory_bytes()
        async with MemoryWatch(running) as memory:
            flood = await _open(running, plan, asks, rate * plan.factor, objectives)
        after = running.memory_bytes()
    best = max(level.tokens_per_s(objectives) for level in levels)
    asked = {
        "workload": plan.workload, "max_tokens": plan.max_tokens, "factor": plan.factor, "minutes": plan.minutes,
        "deadline_s": deadline_of(plan, objectives), "objectives": [str(limit) for limit in objectives],
    }  # fmt: skip
    return {
        "plan": asked,
        "peak": {
            "at_once": knee.at_once, "requests_per_s": round(rate, 3), "good_tokens_per_s": round(best, 2),
            "tokens_per_s_by_level": {str(level.at_once): round(level.tokens_per_s(), 2) for level in levels},
            "e2e_ms": knee.report.latencies()["e2e_ms"],
        },
        "overload": _figures(flood),
        **judged(best, flood, plan.minutes * 60, deadline_of(plan, objectives)),
        "memory": {"before": before, "after": after, "growth_mib": memory.growth_mib()},
    }  # fmt: skip


def objectives_of(knee: ServeReport) -> tuple[Objective, ...]:
    """An objective for whole answers from what they took where the server was just full: `ROOM` times their p99."""
    return (Objective("e2e", float(math.ceil(ROOM * knee.latencies()["e2e_ms"]["p99"]))),)


def deadline_of(plan: OverloadPlan, objectives: Seq[Objective]) -> float | None:
    """Deadline of a request in seconds: the plan's, else the objective for the whole answer, else None. Without one a
    server cannot shed late requests."""
    limits = [limit.limit_ms / 1e3 for limit in objectives if limit.metric == "e2e"]
    return plan.deadline_s or min(limits, default=None)


def judged(best: float, flood: ServeReport, sending_s: float, deadline_s: float | None) -> dict[str, Any]:
    """The four questions. ``best``: good tokens per second at the peak. Goodput is that of the time in which requests
    are sent, from one deadline after the begin on: until then a server that was empty has ended nothing. With the begin
    it receives the deadline too."""
    begin_s, end_s = flood.run.started_s, flood.run.started_s + sending_s
    settled_s = begin_s + min(deadline_s or 0.0, sending_s / 4)
    steady, whole = (goodput(flood, flood.objectives, at_s, end_s) for at_s in (settled_s, begin_s))
    refused = [record for record in flood.run.records if record.outcome == "refused"]
    lost = sum(record.outcome in ("failed", "cut") for record in flood.run.records)
    admitted = len(flood.run.records) - len(refused)
    return {
        "goodput_over_peak": round(steady / best, 4) if best else None,
        "goodput_over_peak_with_begin": round(whole / best, 4) if best else None,
        "admitted": admitted,
        "refused": len(refused),
        "refused_without_hint": sum(record.retry_after_s is None for record in refused),
        "lost": lost,
        "late_share": round(1 - len(flood.good) / admitted, 4) if admitted else None,
        "admitted_p99_over_objective": {str(limit): _p99_share(flood, limit, lost) for limit in flood.objectives},
    }


def _p99_share(flood: ServeReport, limit: Objective, lost: int) -> float | None:
    """The p99 of admitted requests over the objective; None where it lies among those that were lost, or there is
    none."""
    shares = [share for record in flood.answered if (share := limit.share_of(record)) is not None]
    found = float(np.percentile([*shares, *[math.inf] * lost], 99, method="inverted_cdf")) if shares else math.inf
    return round(found, 4) if math.isfinite(found) else None


async def _closed(
    server: LocalServer, plan: OverloadPlan, asks: Iterator[LoadRequest], at_once: int, count: int | None = None
) -> Level:
    """``at_once`` all the time; with a ``count`` only so many, for nothing but warming up."""
    endpoint = GrpcEndpoint(server.grpc_address, Credentials())
    run = LoadRun(endpoint, _TIMEOUT_S)
    try:
        await run.in_turns(asks, at_once, count, plan.settle_s + plan.peak_s if count is None else None)
    finally:
        await endpoint.close()
    begin_s = run.started_s + plan.settle_s
    return Level(at_once, ServeReport(run), begin_s, begin_s + plan.peak_s)


async def _open(
    server: LocalServer, plan: OverloadPlan, asks: Iterator[LoadRequest], rate: float, objectives: tuple[Objective, ...]
) -> ServeReport:
    deadline_s = deadline_of(plan, objectives)
    schedule = [TimedRequest(at_s, next(asks)) for at_s in Arrivals(rate, plan.minutes * 60).offsets(plan.seed)]
    endpoint = GrpcEndpoint(server.grpc_address, Credentials(), deadline_s=deadline_s)
    run = LoadRun(endpoint, _TIMEOUT_S)
    try:
        await run.on_schedule(schedule)
    finally:
        await endpoint.close()
    slip_ms = max(MAX_SLIP_MS, SLIP * (deadline_s or 0.0) * 1e3)
    return ServeReport(run, {"load": f"{plan.factor:g} times the peak"}, objectives, max_slip_ms=slip_ms)


def _figures(report: ServeReport) -> dict[str, Any]:
    figures = report.as_dict(requests=False)
    names = ("valid", "faults", "duration_s", "requests", "latency", "throughput", "goodput", "refusals", "generator")
    return {name: figures[name] for name in (*names, "errors")}
