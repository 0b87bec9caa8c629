"""Measures the peak goodput of a server, and its goodput at several times the load it can serve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.local_server import LocalServer
from bench.serve.endpoints import GrpcEndpoint
from bench.serve.load import MAX_SLIP_MS, LoadRun, ServeReport
from bench.serve.schedule import endless_requests
from specdec.client.connection import Credentials
from specdec.config import Config
from specdec.load.arrivals import Arrivals
from specdec.load.request import LoadRequest, Objective, TimedRequest


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """Closed loops that find the peak, then an open loop above it.

    No prompt occurs twice. Every answer has ``max_tokens`` tokens, so that all requests are equal work.
    """

    workload: str = "humaneval"
    levels: tuple[int, ...] = (4, 8, 16, 32)  # concurrent requests of each closed loop
    peak_s: float = 30.0  # seconds that count at each level
    settle_s: float = 8.0  # seconds before them, which do not count
    factor: float = 4.0  # arrival rate of the overload over the peak rate
    minutes: float = 3.0  # duration of the overload
    max_tokens: int = 32
    seed: int = 0  # of the arrivals


def goodput(report: ServeReport, objectives: Seq[Objective], begin_s: float, end_s: float) -> float:
    """Tokens per second between two times of the run's clock, of requests that met all ``objectives``.

    Tokens count when they arrive, not when their answer ends: answers that run together end together, so the number of
    ends in an interval is random.
    """
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
    """A closed loop with ``at_once`` concurrent requests."""

    at_once: int
    report: ServeReport
    begin_s: float  # of the time that counts, by the run's clock
    end_s: float

    def tokens_per_s(self, objectives: Seq[Objective] = ()) -> float:
        """Tokens per second of answers that met ``objectives``."""
        return goodput(self.report, objectives, self.begin_s, self.end_s)

    @property
    def requests_per_s(self) -> float:
        """Answers per second, from the tokens per second and the mean length."""
        answered = self.report.answered
        mean = sum(sum(record.chunk_tokens) for record in answered) / max(1, len(answered))
        return self.tokens_per_s() / mean if mean else 0.0


def knee_of(levels: Seq[Level]) -> Level:
    """The lowest level at the peak: higher levels add waiting time and no throughput."""
    best = max(level.tokens_per_s() for level in levels)
    return min(
        (level for level in levels if level.tokens_per_s() >= (1 - KNEE) * best), key=lambda level: level.at_once
    )


ROOM = 2.0  # the objective for whole answers, over the p99 of the lowest level at the peak
SLIP = 0.02  # share of the deadline by which the generator may be late
_TIMEOUT_S = 300.0
_WARM_UP = 8  # requests


async def measure_overload(
    config: Config, plan: OverloadPlan, note: Callable[[str], None], **server: str
) -> dict[str, Any]:
    """JSON-able figures: the peak, the goodput under overload, refusals, times of admitted requests.

    server: further arguments of `LocalServer`.

    Raises:
        ChildServerError: the server did not start.
    """
    asks = (ask.of_fixed_length() for ask in endless_requests(plan.workload, plan.max_tokens, note))
    async with LocalServer(config, **server) as running:
        await _closed(running, plan, asks, 2, count=_WARM_UP)
        levels = []
        for at_once in plan.levels:
            levels.append(await _closed(running, plan, asks, at_once))
            note(f"{at_once} at once: {levels[-1].tokens_per_s():.1f} tokens/s")
        knee = knee_of(levels)
        objective, rate = objective_of(knee.report), knee.requests_per_s
        note(f"peak {rate:.2f} requests/s from {knee.at_once} at once; now {plan.factor:g} times that, {objective}")
        flood = await _open(running, plan, asks, rate * plan.factor, objective)
    best = max(level.tokens_per_s([objective]) for level in levels)
    return {
        "plan": {
            "workload": plan.workload, "max_tokens": plan.max_tokens, "factor": plan.factor, "minutes": plan.minutes,
            "objective": str(objective),
        },
        "peak": {
            "at_once": knee.at_once, "requests_per_s": round(rate, 3), "good_tokens_per_s": round(best, 2),
            "tokens_per_s_by_level": {str(level.at_once): round(level.tokens_per_s(), 2) for level in levels},
            "e2e_ms": knee.report.latencies()["e2e_ms"],
        },
        "overload": _figures(flood),
        **judged(best, flood, plan.minutes * 60, objective),
    }  # fmt: skip


def objective_of(knee: ServeReport) -> Objective:
    """The objective for whole answers: `ROOM` times their p99 where the server was just fully loaded."""
    return Objective("e2e", float(math.ceil(ROOM * knee.latencies()["e2e_ms"]["p99"])))


def judged(best: float, flood: ServeReport, sending_s: float, objective: Objective) -> dict[str, Any]:
    """Figures of the overload.

    best: good tokens per second at the peak. Goodput counts while requests are sent, from one deadline after the start:
    an idle server has finished nothing before that.
    """
    begin_s, end_s = flood.run.started_s, flood.run.started_s + sending_s
    settled_s = begin_s + min(objective.limit_ms / 1e3, sending_s / 4)
    good = goodput(flood, [objective], settled_s, end_s)
    refused = [record for record in flood.run.records if record.outcome == "refused"]
    lost = sum(record.outcome in ("failed", "cut") for record in flood.run.records)
    admitted = len(flood.run.records) - len(refused)
    return {
        "goodput_over_peak": round(good / best, 4) if best else None,
        "admitted": admitted,
        "refused": len(refused),
        "refused_without_hint": sum(record.retry_after_s is None for record in refused),
        "lost": lost,
        "late_share": round(1 - len(flood.good) / admitted, 4) if admitted else None,
        "admitted_p99_over_objective": _p99_share(flood, objective, lost),
    }


def _p99_share(flood: ServeReport, objective: Objective, lost: int) -> float | None:
    """The p99 of admitted requests over the objective; None if more than 1 % were lost, or none was answered."""
    shares = [share for record in flood.answered if (share := objective.share_of(record)) is not None]
    found = float(np.percentile([*shares, *[math.inf] * lost], 99, method="inverted_cdf")) if shares else math.inf
    return round(found, 4) if math.isfinite(found) else None


async def _closed(
    server: LocalServer, plan: OverloadPlan, asks: Iterator[LoadRequest], at_once: int, count: int | None = None
) -> Level:
    """A closed loop of the plan's duration, or of ``count`` requests."""
    endpoint = GrpcEndpoint(server.grpc_address, Credentials())
    run = LoadRun(endpoint, _TIMEOUT_S)
    try:
        await run.in_turns(asks, at_once, count, plan.settle_s + plan.peak_s if count is None else None)
    finally:
        await endpoint.close()
    begin_s = run.started_s + plan.settle_s
    return Level(at_once, ServeReport(run), begin_s, begin_s + plan.peak_s)


async def _open(
    server: LocalServer, plan: OverloadPlan, asks: Iterator[LoadRequest], rate: float, objective: Objective
) -> ServeReport:
    """Send Poisson arrivals at ``rate`` per second, with the objective as deadline, so that the server can refuse what
    it cannot serve in time."""
    schedule = [TimedRequest(at_s, next(asks)) for at_s in Arrivals(rate, plan.minutes * 60).offsets(plan.seed)]
    endpoint = GrpcEndpoint(server.grpc_address, Credentials(), deadline_s=objective.limit_ms / 1e3)
    run = LoadRun(endpoint, _TIMEOUT_S)
    try:
        await run.on_schedule(schedule)
    finally:
        await endpoint.close()
    slip_ms = max(MAX_SLIP_MS, SLIP * objective.limit_ms)
    return ServeReport(run, {"load": f"{plan.factor:g} times the peak"}, (objective,), max_slip_ms=slip_ms)


def _figures(report: ServeReport) -> dict[str, Any]:
    figures = report.as_dict(requests=False)
    names = ("valid", "faults", "duration_s", "requests", "latency", "throughput", "goodput", "refusals", "generator")
    return {name: figures[name] for name in (*names, "errors")}
