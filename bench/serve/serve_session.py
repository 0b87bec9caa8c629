"""Carries out a plan of load: warm-up, then the run that counts."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable
from typing import Any

from bench.engine_machine import commit, cpu_model
from bench.serve.asks import endless_asks
from bench.serve.endpoint import Endpoint
from bench.serve.load_run import LoadRun
from bench.serve.serve_plan import ServePlan
from bench.serve.serve_report import ServeReport
from bench.serve.timed_ask import TimedAsk
from bench.serve.trace_file import read_trace

WARM_UP_AT_ONCE = 2
LOOK_S = 0.5


async def run_plan(
    plan: ServePlan,
    endpoint: Endpoint,
    *,
    about: dict[str, Any] | None = None,
    watch: Callable[[LoadRun], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> ServeReport:
    """Put load on ``endpoint``. ``watch`` is shown the run about twice a second, ``note`` is told what is left out.

    Raises:
        WorkloadUnavailableError: the workload's prompts can not be had.
        ConfigError: the trace can not be read.
    """
    asks = endless_asks(plan.workload, plan.max_tokens, note)
    if plan.fixed:
        asks = (ask.of_fixed_length() for ask in asks)
    schedule: list[TimedAsk] | None = None
    if plan.trace is not None:
        schedule = read_trace(plan.trace, plan.speed)
    warm = LoadRun(endpoint, plan.timeout_s)
    await warm.in_turns(asks, WARM_UP_AT_ONCE, plan.warm_up, None)
    if plan.arrivals is not None:
        schedule = [TimedAsk(offset, next(asks)) for offset in plan.arrivals.offsets(plan.seed)]
    run = LoadRun(endpoint, plan.timeout_s)
    watcher = asyncio.create_task(_watch(run, watch)) if watch is not None else None
    try:
        if schedule is not None:
            await run.on_schedule(schedule)
        else:
            await run.in_turns(asks, plan.at_once, plan.requests, plan.duration_s)
    finally:
        if watcher is not None:
            watcher.cancel()
    facts = _facts(plan) | (about or {})
    return ServeReport(run, facts, plan.objectives, plan.price_per_hour, plan.max_slip_ms)


async def _watch(run: LoadRun, watch: Callable[[LoadRun], None]) -> None:
    while True:
        watch(run)
        await asyncio.sleep(LOOK_S)


def _facts(plan: ServePlan) -> dict[str, Any]:
    return {
        "load": plan.kind,
        "workload": plan.trace.name if plan.trace is not None else plan.workload,
        "max_tokens": plan.max_tokens,
        "fixed_length": plan.fixed,
        "seed": plan.seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "generator_cpu": cpu_model(),
        "generator_cores": len(os.sched_getaffinity(0)),
    }
