"""A run of load: its plan, the open or closed loop that sends requests, and the figures that result."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.local_server import BackgroundWatch
from bench.machine import host_facts
from bench.serve.schedule import endless_asks, read_trace
from specdec.errors import ConfigError, SpecdecError
from specdec.load.arrivals import Arrivals
from specdec.load.figures import spread
from specdec.load.request import Endpoint, LoadRequest, Objective, Record, RefusedError, TimedRequest

TICK_S = 0.01


class LagMeter(BackgroundWatch):
    """Use as ``async with`` around the work. ``lags_ms``: by how much each of many short sleeps overran."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            until = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags_ms.append((clock() - until) * 1e3)


LEAD_S = 0.05
REFUSED_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # of one in a closed loop that was refused; the first without a hint


class LoadRun:
    """``records`` grow in the order of sending and may be looked at while it runs. Make one per run."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 120.0) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._lag = LagMeter()
        self.records: list[Record] = []
        self.planned: int | None = None
        self.open_loop = False
        self.started_s = self.ended_s = 0.0

    @property
    def lags_ms(self) -> list[float]:
        """By how much our own event loop was late, sampled all the time."""
        return self._lag.lags_ms

    async def on_schedule(self, schedule: Seq[TimedRequest], start_s: float | None = None) -> None:
        """Send every request when it is due, whatever became of those before; returns when all have ended. ``start_s``:
        what the offsets count from, by the event loop's clock; None: now.

        A request's times count from when it was due, so one that a slow server would have kept us from sending is not
        left out (coordinated omission).
        """
        self.open_loop, self.planned = True, len(schedule)
        clock = asyncio.get_running_loop().time
        self.started_s = clock() + LEAD_S if start_s is None else start_s
        async with self._lag, asyncio.TaskGroup() as tasks:
            for offset_s, ask in schedule:
                record = Record(ask.name, self.started_s + offset_s)
                await asyncio.sleep(max(0.0, record.due_s - clock()))
                tasks.create_task(self._send(ask, record))
        self.ended_s = clock()

    async def in_turns(
        self, asks: Iterator[LoadRequest], at_once: int, count: int | None, duration_s: float | None
    ) -> None:
        """Keep ``at_once`` requests running until ``count`` were sent or ``duration_s`` has passed; those that run
        then are waited for."""
        self.planned = count
        clock = asyncio.get_running_loop().time
        self.started_s = clock()
        left = iter(range(count)) if count is not None else iter(int, 1)

        async def turns() -> None:
            while (duration_s is None or clock() < self.started_s + duration_s) and next(left, None) is not None:
                ask = next(asks)
                record = Record(ask.name, clock())
                await self._send(ask, record)
                if not record.ok:
                    await asyncio.sleep(min(record.retry_after_s or REFUSED_PAUSE_S, LONGEST_PAUSE_S))

        async with self._lag, asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(turns())
        self.ended_s = clock()

    async def _send(self, ask: LoadRequest, record: Record) -> None:
        clock = asyncio.get_running_loop().time
        record.sent_s = clock()
        self.records.append(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._endpoint.send(ask, record)
        except TimeoutError:
            record.outcome, record.error = "cut", f"no end within {self._timeout_s:g} s"
        except RefusedError as error:
            record.outcome, record.error, record.retry_after_s = "refused", str(error), error.retry_after_s
        except SpecdecError as error:
            record.outcome, record.error = "failed", str(error)
        finally:
            record.end_s = clock()


MAX_SLIP_MS = 10.0


@dataclass(frozen=True, slots=True)
class ServeReport:
    """``about``: what was run where. ``max_slip_ms``: how late the generator may be at p99. ``price_per_hour``: of the
    machine that served, 0 for none given."""

    run: LoadRun
    about: Mapping[str, Any] = field(default_factory=dict)
    objectives: Seq[Objective] = ()
    price_per_hour: float = 0.0
    max_slip_ms: float = MAX_SLIP_MS

    @property
    def answered(self) -> list[Record]:
        """Requests with a whole answer."""
        return [record for record in self.run.records if record.ok]

    @property
    def duration_s(self) -> float:
        """From the beginning to the end of the last answer."""
        return max(self.run.ended_s - self.run.started_s, 1e-9)

    @property
    def good(self) -> list[Record]:
        """Answered within every objective."""
        return [record for record in self.answered if all(limit.kept_by(record) for limit in self.objectives)]

    def faults(self) -> list[str]:
        """Why the figures are not the server's: the generator could not keep up. Empty for a valid run."""
        found = []
        slips = spread([record.slip_ms for record in self.run.records])
        if self.run.open_loop and slips.get("p99", 0.0) > self.max_slip_ms:
            found.append(
                f"requests were sent late: {slips['p99']:.1f} ms at p99, {self.max_slip_ms:g} are allowed; "
                "run the generator on a machine of its own, or ask for less"
            )
        lags = spread(self.run.lags_ms)
        if lags.get("p99", 0.0) > self.max_slip_ms:
            found.append(
                f"the generator itself was busy: its event loop was {lags['p99']:.1f} ms late at p99, "
                f"{self.max_slip_ms:g} are allowed"
            )
        if not self.answered:
            found.append("no request was answered")
        return found

    def latencies(self) -> dict[str, dict[str, float | int]]:
        """Spreads in ms of TTFT, TPOT, E2E and the time between messages, and of the tokens in a message."""
        answered = self.answered
        counts = [count for record in answered for count in record.chunk_tokens]
        means = [r.output_tokens / len(r.chunk_s) for r in answered if r.chunk_s and not r.chunk_tokens]
        return {
            "ttft_ms": spread([record.ttft_ms for record in answered]),
            "tpot_ms": spread([tpot for record in answered if (tpot := record.tpot_ms) is not None]),
            "inter_chunk_ms": spread([gap for record in answered for gap in record.gaps_ms]),
            "e2e_ms": spread([record.e2e_ms for record in answered]),
            # Where the server does not say how many tokens a message has, each answer counts with its mean.
            "tokens_per_chunk": spread(counts or means),
        }

    def as_dict(self, *, requests: bool = True) -> dict[str, Any]:
        """JSON-able: every figure, and those of every request unless not asked for."""
        records, faults = self.run.records, self.faults()
        figures: dict[str, Any] = {
            **self.about, "valid": not faults, "faults": faults, "duration_s": round(self.duration_s, 3),
            "requests": {"planned": self.run.planned, "sent": len(records)} | self._outcomes(),
            "latency": self.latencies(), "throughput": self._throughput(), "goodput": self._goodput(),
            "generator": {
                "slip_ms": spread([record.slip_ms for record in records]), "lag_ms": spread(self.run.lags_ms),
            },
            "refusals": self._refusals(), "errors": dict(Counter(r.error for r in records if not r.ok).most_common(10)),
        }  # fmt: skip
        if self.price_per_hour:
            spent = self.price_per_hour * self.duration_s / 3600
            tokens = sum(record.output_tokens for record in self.answered)
            figures["cost"] = {"price_per_hour": self.price_per_hour, "output_tokens_per_dollar": round(tokens / spent)}
        steps = [r.tokens_per_step for r in self.answered if r.tokens_per_step is not None]
        if steps:
            figures["tokens_per_step"] = spread(steps)
        if requests:
            figures["each"] = [record.as_dict(self.run.started_s) for record in records]
        return figures

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(record.outcome for record in self.run.records)
        return {outcome: counts[outcome] for outcome in ("ok", "refused", "failed", "cut")}

    def _throughput(self) -> dict[str, float]:
        answered = self.answered
        totals = {
            "requests": len(answered),
            "output_tokens": sum(r.output_tokens for r in answered),
            "prompt_tokens": sum(r.prompt_tokens for r in answered),
        }
        return {f"{name}_per_s": round(total / self.duration_s, 4) for name, total in totals.items()}

    def _goodput(self) -> dict[str, Any]:
        good, sent = self.good, len(self.run.records)
        return {
            "objectives": [str(limit) for limit in self.objectives],
            "requests_per_s": round(len(good) / self.duration_s, 4),
            "output_tokens_per_s": round(sum(r.output_tokens for r in good) / self.duration_s, 4),
            "share_of_sent": round(len(good) / sent, 4) if sent else 0.0,
        }

    def _refusals(self) -> dict[str, Any]:
        refused = [record for record in self.run.records if record.outcome == "refused"]
        hints = [record.retry_after_s for record in refused if record.retry_after_s is not None]
        return {"n": len(refused), "with_retry_hint": len(hints), "retry_after_s": spread(hints)}


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One of three ways to send: at ``arrivals``, as in the file ``trace`` (``speed`` times as fast), or, with neither,
    ``at_once`` requests at any time until ``requests`` were sent or ``duration_s`` has passed. ``warm_up`` requests
    come before, two at a time, and are not counted. ``fixed``: every answer of a workload is as long as it may be, so
    that one request is as much work as another.

    Raises:
        ConfigError: the plan has no end, or two ways to send.
    """

    workload: str = "humaneval"
    at_once: int = 1
    requests: int | None = None
    duration_s: float | None = None
    arrivals: Arrivals | None = None
    trace: Path | None = None
    speed: float = 1.0
    max_tokens: int | None = None
    fixed: bool = False
    warm_up: int = 4
    seed: int = 0
    timeout_s: float = 120.0
    objectives: tuple[Objective, ...] = ()
    price_per_hour: float = 0.0
    max_slip_ms: float = MAX_SLIP_MS

    def __post_init__(self) -> None:
        if self.arrivals is not None and self.trace is not None:
            raise ConfigError("serve: a rate and a trace both say when to send; give one of them")
        if self.arrivals is None and self.trace is None and self.requests is None and self.duration_s is None:
            raise ConfigError("serve: give a number of requests or a duration")

    @property
    def kind(self) -> str:
        """How requests are sent, in words."""
        if self.trace is not None:
            return f"replay of {self.trace.name} at {self.speed:g} x"
        if self.arrivals is None:
            return f"closed loop, {self.at_once} at once"
        rate, shape = self.arrivals, self.arrivals.shape
        law = "evenly spaced" if shape is None else "Poisson" if shape == 1 else f"gamma of shape {shape:g}"
        to = "" if rate.end_rate is None else f" to {rate.end_rate:g}"
        return f"open loop, {law}, {rate.rate:g}{to} requests/s for {rate.duration_s:g} s"


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
    """Put load on ``endpoint``. ``watch`` receives the run about twice a second, ``note`` what is left out.

    Raises:
        WorkloadUnavailableError: the workload's prompts can not be had.
        ConfigError: the trace can not be read.
    """
    asks = endless_asks(plan.workload, plan.max_tokens, note)
    if plan.fixed:
        asks = (ask.of_fixed_length() for ask in asks)
    schedule: list[TimedRequest] | None = None
    if plan.trace is not None:
        schedule = read_trace(plan.trace, plan.speed)
    warm = LoadRun(endpoint, plan.timeout_s)
    await warm.in_turns(asks, WARM_UP_AT_ONCE, plan.warm_up, None)
    if plan.arrivals is not None:
        schedule = [TimedRequest(offset, next(asks)) for offset in plan.arrivals.offsets(plan.seed)]
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
    host = host_facts()
    return {
        "load": plan.kind,
        "workload": plan.trace.name if plan.trace is not None else plan.workload,
        "max_tokens": plan.max_tokens,
        "fixed_length": plan.fixed,
        "seed": plan.seed,
        "date": host["date"],
        "commit": host["commit"],
        "generator_cpu": host["cpu"],
        "generator_cores": host["cores"],
    }
