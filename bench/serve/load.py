"""A run of load: its plan, the open or closed loop that sends requests, and the figures that result, as tables too."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bench.machine import host_facts
from bench.serve.schedule import endless_requests, read_trace
from specdec.errors import SpecdecError
from specdec.load.arrivals import Arrivals
from specdec.load.figures import QUANTILES, FigureTable, spread, spread_cells, throughput
from specdec.load.request import Endpoint, LoadRequest, Objective, Record, RefusedError, TimedRequest

TICK_S = 0.01


@contextlib.asynccontextmanager
async def measured_lags(lags_ms: list[float]) -> AsyncIterator[None]:
    """Adds to ``lags_ms`` how late the event loop is after each of many short sleeps during the block."""
    clock = asyncio.get_running_loop().time

    async def watch() -> None:
        while True:
            until = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            lags_ms.append((clock() - until) * 1e3)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()


LEAD_S = 0.05  # from the call of `on_schedule` to the first request
REFUSED_PAUSE_S = 0.1  # pause of a closed loop after a refusal without a retry hint
LONGEST_PAUSE_S = 1.0  # longest pause after a refusal
RECENT = 1000  # answers whose quantiles a progress line shows


class Progress:
    """Counts of a run so far, updated per request: counting all records of a long run delays the generator."""

    def __init__(self) -> None:
        self.ended = self.answered = self.output_tokens = 0
        self.recent_ttft_ms: deque[float] = deque(maxlen=RECENT)

    def add(self, record: Record) -> None:
        self.ended += 1
        if record.ok:
            self.answered += 1
            self.output_tokens += record.output_tokens
            self.recent_ttft_ms.append(record.ttft_ms)


class LoadRun:
    """Sends the requests of one run. ``records`` grow in the order of sending and may be read during the run."""

    def __init__(self, endpoint: Endpoint, timeout_s: float = 120.0) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self.lags_ms: list[float] = []  # delays of the event loop, sampled during the run
        self.records: list[Record] = []
        self.progress = Progress()
        self.planned: int | None = None
        self.started_s = self.ended_s = 0.0

    async def on_schedule(self, schedule: Seq[TimedRequest]) -> None:
        """Send every request at its time, independent of earlier ones; returns when all have ended.

        Times of a request count from its scheduled time, which avoids coordinated omission.
        """
        self.planned = len(schedule)
        clock = asyncio.get_running_loop().time
        self.started_s = clock() + LEAD_S
        async with measured_lags(self.lags_ms), asyncio.TaskGroup() as tasks:
            for offset_s, ask in schedule:
                record = Record(ask.name, self.started_s + offset_s)
                await asyncio.sleep(max(0.0, record.due_s - clock()))
                tasks.create_task(self._send(ask, record))
        self.ended_s = clock()

    async def in_turns(
        self, asks: Iterator[LoadRequest], at_once: int, count: int | None, duration_s: float | None
    ) -> None:
        """Keep ``at_once`` requests running until ``count`` were sent or ``duration_s`` has passed, then wait for the
        running ones."""
        self.planned = count
        clock = asyncio.get_running_loop().time
        self.started_s = clock()
        left = islice(asks, count)

        async def turns() -> None:
            while (duration_s is None or clock() < self.started_s + duration_s) and (ask := next(left, None)):
                record = Record(ask.name, clock())
                await self._send(ask, record)
                if not record.ok:
                    await asyncio.sleep(min(record.retry_after_s or REFUSED_PAUSE_S, LONGEST_PAUSE_S))

        async with measured_lags(self.lags_ms), asyncio.TaskGroup() as tasks:
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
            record.outcome, record.error = "cut", f"not finished within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.outcome, record.error = "cut", "the run was stopped"
            raise
        except RefusedError as error:
            record.outcome, record.error, record.retry_after_s = "refused", str(error), error.retry_after_s
        except SpecdecError as error:
            record.outcome, record.error = "failed", str(error)
        finally:
            record.end_s = clock()
            self.progress.add(record)


MAX_SLIP_MS = 10.0
_NUMBER = re.compile(r"(?<!HTTP )\b\d+(\.\d+)?")  # in an error; the status in "HTTP 503" stays


@dataclass(frozen=True, slots=True)
class ServeReport:
    run: LoadRun
    about: Mapping[str, Any] = field(default_factory=dict)  # description of load, server and generator
    objectives: Seq[Objective] = ()
    max_slip_ms: float = MAX_SLIP_MS  # longest delay of the generator at p99 in a valid run
    stopped: bool = False  # by Ctrl-C, before its end

    @property
    def answered(self) -> list[Record]:
        """Requests with a complete answer."""
        return [record for record in self.run.records if record.ok]

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the end of the last answer."""
        return max(self.run.ended_s - self.run.started_s, 1e-9)

    @property
    def good(self) -> list[Record]:
        """Answered requests that met every objective."""
        return [record for record in self.answered if all(limit.kept_by(record) for limit in self.objectives)]

    def faults(self) -> list[str]:
        """Reasons why the run is invalid, such as a generator that could not keep up."""
        remedy = f"{self.max_slip_ms:g} are allowed; run the generator on another machine, or lower the load"
        slip_ms = spread([record.slip_ms for record in self.run.records]).get("p99", 0.0)
        lag_ms = spread(self.run.lags_ms).get("p99", 0.0)
        found = []
        if slip_ms > self.max_slip_ms:
            found.append(f"requests were sent late: {slip_ms:.1f} ms at p99, {remedy}")
        if lag_ms > self.max_slip_ms:
            found.append(f"the generator was busy: its event loop was {lag_ms:.1f} ms late at p99, {remedy}")
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
            # If the server does not report the tokens of a message, each answer counts with its mean, if it has one.
            "tokens_per_chunk": spread(counts or [mean for mean in means if mean]),
        }

    def as_dict(self, *, requests: bool = True) -> dict[str, Any]:
        """Every figure as JSON types; with ``requests`` also those of every request."""
        records, faults = self.run.records, self.faults()
        figures: dict[str, Any] = {
            **self.about, "valid": not faults, "faults": faults, "stopped": self.stopped,
            "duration_s": round(self.duration_s, 3),
            "requests": {"planned": self.run.planned, "sent": len(records)} | self._outcomes(),
            "latency": self.latencies(), "throughput": throughput(self.answered, self.duration_s),
            "goodput": self._goodput(),
            "generator": {
                "slip_ms": spread([record.slip_ms for record in records]), "lag_ms": spread(self.run.lags_ms),
            },
            "refusals": self._refusals(), "errors": self._errors(),
        }  # fmt: skip
        steps = [r.tokens_per_step for r in self.answered if r.tokens_per_step is not None]
        if steps:
            figures["tokens_per_step"] = spread(steps)
        if requests:
            figures["each"] = [record.as_dict(self.run.started_s) for record in records]
        return figures

    def _outcomes(self) -> dict[str, int]:
        counts = Counter(record.outcome for record in self.run.records)
        return {outcome: counts[outcome] for outcome in ("ok", "refused", "failed", "cut")}

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

    def _errors(self) -> dict[str, int]:
        """The most frequent errors. Those that differ only in numbers count as one, which has the first one's text."""
        texts: dict[str, str] = {}
        failed = (record.error for record in self.run.records if not record.ok)
        return dict(Counter(texts.setdefault(_NUMBER.sub("N", text), text) for text in failed).most_common(10))


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A load: an open loop with ``arrivals``, the replay of a ``trace``, or else a closed loop of so many ``requests``
    or of ``duration_s``."""

    workload: str = "humaneval"
    at_once: int = 1  # concurrent requests of a closed loop
    requests: int | None = None  # end of a closed loop
    duration_s: float | None = None  # end of a closed loop
    arrivals: Arrivals | None = None
    trace: Path | None = None
    speed: float = 1.0  # of the replay: 2 takes half the time
    max_tokens: int | None = None  # None: each workload's own limit
    fixed: bool = False  # every answer has `max_tokens` tokens, so that all requests are equal work
    warm_up: int = 4  # requests before, two at a time, which do not count
    seed: int = 0  # of the arrivals
    timeout_s: float = 120.0  # of a request
    objectives: tuple[Objective, ...] = ()
    max_slip_ms: float = MAX_SLIP_MS

    @property
    def kind(self) -> str:
        if self.trace is not None:
            return f"replay of {self.trace.name} at {self.speed:g} x"
        if self.arrivals is None:
            return f"closed loop, {self.at_once} at once"
        rate, shape = self.arrivals, self.arrivals.shape
        law = "evenly spaced" if shape is None else "Poisson" if shape == 1 else f"gamma of shape {shape:g}"
        return f"open loop, {law}, {rate.rate:g} requests/s for {rate.duration_s:g} s"


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
    """Put load on ``endpoint``; a cancelled call still returns its report if an answer is complete. watch: receives the
    run about twice a second. note: receives omitted prompts.

    Raises:
        WorkloadUnavailableError: the workload's prompts are not installed.
        ConfigError: the trace cannot be read.
    """
    # A server remembers the answers of earlier runs, and would draft these from them.
    salt = "" if plan.workload == "shared-prefix" else uuid.uuid4().hex
    asks = (replace(ask, salt=salt + ask.salt) for ask in endless_requests(plan.workload, plan.max_tokens, note))
    if plan.fixed:
        asks = (ask.of_fixed_length() for ask in asks)
    schedule = None if plan.trace is None else read_trace(plan.trace, plan.speed)
    await LoadRun(endpoint, plan.timeout_s).in_turns(asks, WARM_UP_AT_ONCE, plan.warm_up, None)
    if plan.arrivals is not None:
        schedule = [TimedRequest(offset, next(asks)) for offset in plan.arrivals.offsets(plan.seed)]
    run = LoadRun(endpoint, plan.timeout_s)
    stopped = False
    watcher = asyncio.create_task(_watch(run, watch)) if watch is not None else None
    try:
        if schedule is not None:
            await run.on_schedule(schedule)
        else:
            await run.in_turns(asks, plan.at_once, plan.requests, plan.duration_s)
    except asyncio.CancelledError:
        if not run.progress.answered:
            raise
        run.ended_s, stopped = asyncio.get_running_loop().time(), True
    finally:
        if watcher is not None:
            watcher.cancel()
    return ServeReport(run, _facts(plan) | (about or {}), plan.objectives, plan.max_slip_ms, stopped)


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


NAMES = {
    "ttft_ms": "time to first text, ms",
    "tpot_ms": "time per output token, ms",
    "inter_chunk_ms": "between messages, ms",
    "e2e_ms": "whole answer, ms",
    "tokens_per_chunk": "tokens per message",
}


def progress_line(run: LoadRun, now_s: float) -> str:
    """The progress of a run; the times to first text are those of the last `RECENT` answers."""
    sent, so_far = len(run.records), run.progress
    passed = max(now_s - run.started_s, 1e-3)
    ttft = spread([*so_far.recent_ttft_ms])
    of = "" if run.planned is None else f"/{run.planned}"
    words = [
        f"{passed:6.1f} s", f"sent {sent}{of}", f"running {sent - so_far.ended}", f"answered {so_far.answered}",
        f"not {so_far.ended - so_far.answered}", f"{so_far.output_tokens / passed:.1f} tokens/s",
        f"TTFT p50 {ttft['p50']:.0f} p99 {ttft['p99']:.0f} ms" if so_far.answered else "TTFT -",
    ]  # fmt: skip
    return "  ".join(words)


def report_tables(report: ServeReport) -> Iterator[FigureTable]:
    figures = report.as_dict(requests=False)
    columns = ("n", "mean", *(f"p{q}" for q in QUANTILES), "max")
    rows = [[NAMES[name], *spread_cells(found, columns)] for name, found in figures["latency"].items()]
    yield FigureTable(("", *columns), rows, str(figures.get("load", "")))
    yield FigureTable(("figure", "value"), _totals(figures))


def _totals(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    requests, goodput, generator = figures["requests"], figures["goodput"], figures["generator"]
    limits = ", ".join(f"{limit} ms" for limit in goodput["objectives"]) or "no objective"
    rates = {name: rate for name, rate in figures["throughput"].items() if rate or not requests["ok"]}
    rows: list[tuple[str, ...]] = [
        ("requests", ", ".join(f"{count} {name}" for name, count in requests.items() if count)),
        ("duration, s", f"{figures['duration_s']:.1f}"),
        *((name.replace("_per_s", "/s").replace("_", " "), f"{rate:.2f}") for name, rate in rates.items()),
        ("goodput, requests/s", f"{goodput['requests_per_s']:.2f} ({limits})"),
        ("good of all sent", f"{goodput['share_of_sent']:.1%}"),
        ("sent late, ms at p99", *spread_cells(generator["slip_ms"], ["p99"])),
        ("generator late, ms at p99", *spread_cells(generator["lag_ms"], ["p99"])),
    ]
    if "output_tokens_per_s" not in rates:
        rows.append(("tokens", "the server reported none, so figures of tokens are missing"))
    if "tokens_per_step" in figures:
        rows.append(("tokens per step", f"{figures['tokens_per_step']['mean']:.2f}"))
    if figures["refusals"]["n"]:
        refusals = figures["refusals"]
        rows.append(("refusals with a retry hint", f"{refusals['with_retry_hint']} of {refusals['n']}"))
    rows += [(f"error ({count} x)", error[:120]) for error, count in figures["errors"].items()]
    return rows
