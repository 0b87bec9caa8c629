"""Finds what a server can do, asks for several times that, and compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from bench.local_server import LocalServer
from bench.overload.memory_watch import MemoryWatch
from bench.overload.overload_plan import OverloadPlan
from bench.serve.arrivals import Arrivals
from bench.serve.grpc_endpoint import GrpcEndpoint
from bench.serve.objective import Objective
from bench.serve.serve_plan import ServePlan
from bench.serve.serve_report import ServeReport
from bench.serve.serve_session import run_plan
from specdec.client import Credentials
from specdec.config import Config

ROOM = 2.0  # the objective where none is given: so many times the peak's p99
_TIMEOUT_S = 120.0


async def measure_overload(config: Config, plan: OverloadPlan, note: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able figures: the peak, what is left of it under overload, refusals, admitted requests' times, memory.

    Raises:
        LocalServerError: the server did not start.
        SpecdecError: it answers nothing.
    """
    async with LocalServer(config) as server:
        note("finding the peak")
        levels = {level: await _closed(server, plan, level, first=level == plan.levels[0]) for level in plan.levels}
        at_once, peak = max(levels.items(), key=lambda item: len(item[1].answered) / item[1].duration_s)
        objectives = plan.objectives or objectives_of(peak)
        rate = len(peak.answered) / peak.duration_s
        note(f"peak {rate:.2f} requests/s with {at_once} at once; now {plan.factor:g} times that")
        before = server.memory_bytes()
        async with MemoryWatch(server) as memory:
            flood = await _open(server, plan, rate * plan.factor, objectives)
        after = server.memory_bytes()
    peak = ServeReport(peak.run, peak.about, objectives)
    found_at = {str(n): round(len(report.answered) / report.duration_s, 3) for n, report in levels.items()}
    asked = {
        "workload": plan.workload, "max_tokens": plan.max_tokens, "factor": plan.factor, "minutes": plan.minutes,
        "deadline_s": deadline_of(plan, objectives), "objectives": [str(limit) for limit in objectives],
    }  # fmt: skip
    return {
        "plan": asked,
        "peak": {"at_once": at_once, "requests_per_s_by_level": found_at, **_figures(peak)},
        "overload": _figures(flood),
        **judged(peak, flood, plan.minutes * 60),
        "memory": {"before": before, "after": after, "growth_mib": memory.growth_mib()},
    }


def objectives_of(peak: ServeReport) -> tuple[Objective, ...]:
    """An objective for whole answers from what they took where the server was just full: `ROOM` times their p99."""
    return (Objective("e2e", float(math.ceil(ROOM * peak.latencies()["e2e_ms"]["p99"]))),)


def deadline_of(plan: OverloadPlan, objectives: Seq[Objective]) -> float | None:
    """Seconds a request has: as planned, else its objective for the whole answer; None where there is none. A server
    that is not told of it can not know which requests are in vain."""
    limits = [limit.limit_ms / 1e3 for limit in objectives if limit.metric == "e2e"]
    return plan.deadline_s or min(limits, default=None)


def judged(peak: ServeReport, flood: ServeReport, sending_s: float) -> dict[str, Any]:
    """The four questions. Goodput counts output tokens per second of answers that kept the objectives; of the overload
    within the time in which requests were sent, for what comes after is no overload."""
    good = sum(record.output_tokens for record in flood.good if record.end_s <= flood.run.started_s + sending_s)
    best = sum(record.output_tokens for record in peak.good) / peak.duration_s
    refused = [record for record in flood.run.records if record.outcome == "refused"]
    lost = sum(record.outcome in ("failed", "cut") for record in flood.run.records)
    return {
        "goodput_over_peak": round(good / sending_s / best, 4) if best else None,
        "refused": len(refused),
        "refused_without_hint": sum(record.retry_after_s is None for record in refused),
        "lost": lost,
        "admitted_p99_over_objective": {str(limit): _p99_share(flood, limit, lost) for limit in flood.objectives},
    }


def _p99_share(flood: ServeReport, limit: Objective, lost: int) -> float | None:
    """The p99 of admitted requests over the objective; None where it lies among those that were lost, or there is
    none."""
    shares = [share for record in flood.answered if (share := limit.share_of(record)) is not None]
    found = float(np.percentile([*shares, *[math.inf] * lost], 99, method="inverted_cdf")) if shares else math.inf
    return round(found, 4) if math.isfinite(found) else None


async def _closed(server: LocalServer, plan: OverloadPlan, at_once: int, *, first: bool) -> ServeReport:
    asked = ServePlan(
        workload=plan.workload, at_once=at_once, duration_s=plan.peak_s, max_tokens=plan.max_tokens, fixed=True,
        warm_up=8 if first else 0, timeout_s=_TIMEOUT_S,
    )  # fmt: skip
    return await _run(server, asked, None)


async def _open(server: LocalServer, plan: OverloadPlan, rate: float, objectives: tuple[Objective, ...]) -> ServeReport:
    asked = ServePlan(
        workload=plan.workload, arrivals=Arrivals(rate, plan.minutes * 60), max_tokens=plan.max_tokens, fixed=True,
        warm_up=0, timeout_s=_TIMEOUT_S, objectives=objectives, seed=plan.seed,
    )  # fmt: skip
    return await _run(server, asked, deadline_of(plan, objectives))


async def _run(server: LocalServer, asked: ServePlan, deadline_s: float | None) -> ServeReport:
    endpoint = GrpcEndpoint(server.grpc_address, Credentials(), deadline_s=deadline_s)
    try:
        return await run_plan(asked, endpoint)
    finally:
        await endpoint.close()


def _figures(report: ServeReport) -> dict[str, Any]:
    figures = report.as_dict(requests=False)
    names = ("valid", "faults", "duration_s", "requests", "latency", "throughput", "goodput", "refusals", "generator")
    return {name: figures[name] for name in (*names, "errors")}
