"""One run of `specdec bench engine`: its plan, the cost of speculation that is off, the report and its tables."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from rich.table import Table

from bench.engine_bench import BenchError, EngineBench, Say, WorkloadRuns
from bench.engine_runs import AUTO, OFF, Setting, WorkloadSummary, per_second
from bench.machine import engine_facts
from bench.workloads.make import make_workload
from bench.workloads.workload import BenchPrompt, Workload, WorkloadUnavailableError, long_text
from specdec.core.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine, EngineParts
from specdec.load.figures import in_cell, rounded
from verify_kernels.forward_batch import PAGE_SIZE

MAX_TOKENS = 64
PROMPT_TOKENS = 128


@dataclass(slots=True)
class OffCost:
    """Milliseconds per step of two engines that run in turns: one with drafters, one without."""

    requests: list[tuple[list[float], list[float]]]  # each one's steps, in both engines

    def as_dict(self) -> dict[str, float]:
        """The figures by name. Ratios are of the engine with drafters over the one without: 1.01 is a cost of 1 %."""
        engines = list(zip(*self.requests, strict=True))
        loaded_ms, bare_ms = (list(chain(*requests)) for requests in engines)
        loaded_mean, bare_mean = (statistics.median(map(statistics.fmean, requests)) for requests in engines)
        loaded, bare = statistics.median(loaded_ms), statistics.median(bare_ms)
        pairs = statistics.median(a / b for a, b in zip(loaded_ms, bare_ms, strict=True))
        return {
            "steps": len(loaded_ms),
            "loaded_step_ms": round(loaded, 4),
            "bare_step_ms": round(bare, 4),
            "step_ratio_of_medians": round(loaded / bare, 4),
            "step_median_of_ratios": round(pairs, 4),
            "tpot_ratio_of_medians": round(loaded_mean / bare_mean, 4),
        }


class OffCostBench:
    """Steps two engines over one decoder and KV cache in turns, so that changes of the machine affect both alike."""

    def __init__(self, loaded: Engine, parts: EngineParts) -> None:
        speculation = parts.config.speculation.model_copy(update={"enabled": False, "trace_file": None})
        config = parts.config.model_copy(update={"speculation": speculation})
        self._loaded = loaded
        self._bare = Engine(dataclasses.replace(parts, drafters=(), config=config, trace_steps=0))
        self._tokens = parts.tokenizer.encode(long_text())

    def run(self, requests: int = 8) -> OffCost:
        """Decode ``requests`` real prompts greedily with both engines."""
        self._pair(-1)  # a warm-up
        return OffCost([self._pair(number) for number in range(requests)])

    def _pair(self, number: int) -> tuple[list[float], list[float]]:
        """Milliseconds of the decode steps of one request, in both engines."""
        loaded = self._steps(self._loaded, self._request("loaded", number))
        bare = self._steps(self._bare, self._request("bare", number))
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(MAX_TOKENS - 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(next((loaded, bare)[which]))
        return times

    def _steps(self, engine: Engine, request: Request) -> Iterator[float]:
        """Milliseconds of each step after the one with the first token, which runs before the first is returned."""
        engine.submit(request)
        while not any(isinstance(event, Delta) for event in engine.step()):
            pass
        while engine.has_work():
            began = time.perf_counter()
            engine.step()
            yield (time.perf_counter() - began) * 1e3

    def _request(self, engine: str, number: int) -> Request:
        start = (number + 1) * PROMPT_TOKENS % max(1, len(self._tokens) - PROMPT_TOKENS)
        return Request(
            f"off-cost-{number}",
            tuple(self._tokens[start : start + PROMPT_TOKENS]),
            SamplingParams(temperature=0.0),
            StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
            speculation=SpeculationParams(SpeculationMode.OFF),
            cache_salt=f"off-cost/{engine}",
        )


def fixed_figures(runs: WorkloadRuns, fixed: Seq[str]) -> dict[str, float | None]:
    """Milliseconds per output token of off, auto and the arms in ``fixed``, as
    `WorkloadRuns.ms_per_token_beside_off`."""
    return {arm: rounded(runs.ms_per_token_beside_off(arm)) for arm in (OFF.name, AUTO.name, *fixed)}


def best_fixed(runs: WorkloadRuns, fixed: Seq[str]) -> dict[str, Any] | None:
    """The fastest of the arms in ``fixed``, and its time over auto's (above 1: auto is faster); None if nothing was
    long enough to time."""
    figures = fixed_figures(runs, fixed)
    timed = [(ms, arm) for arm in fixed if (ms := figures[arm]) is not None]
    auto = figures[AUTO.name]
    if not timed or auto is None:
        return None
    ms, arm = min(timed)
    return {"setting": arm, "ms_per_token": ms, "over_auto": round(ms / auto, 4)}


@dataclass(slots=True)
class EngineReport:
    machine: dict[str, Any]
    runs: list[WorkloadRuns] = field(default_factory=list)
    fixed: tuple[str, ...] = ()  # names of the fixed settings that ran
    skipped: list[str] = field(default_factory=list)  # omitted workloads, with the reason
    off_cost: OffCost | None = None  # None unless the plan asks for it
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, including every prompt's, as JSON types."""
        figures: dict[str, Any] = {
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
            "workloads": {runs.workload: runs.summary().as_dict() for runs in self.runs},
        }
        if self.fixed:
            figures["fixed_ms_per_token"] = {runs.workload: fixed_figures(runs, self.fixed) for runs in self.runs}
            figures["auto_against_best_fixed"] = {runs.workload: best_fixed(runs, self.fixed) for runs in self.runs}
        if self.off_cost is not None:
            figures["off_cost"] = self.off_cost.as_dict()
        figures["prompts"] = {runs.workload: runs.as_dict() for runs in self.runs}
        return figures


SEED = 20_26


@dataclass(frozen=True, slots=True)
class EngineBenchPlan:
    workloads: tuple[str, ...]
    prompts: int = 8  # counted ones per workload
    max_tokens: int | None = None  # None: each workload's own limit
    temperature: float = 0.0
    fixed: tuple[Setting, ...] = ()  # arms besides off and auto
    off_cost: bool = False  # measure the cost of speculation that is off
    at_once: int = 8  # concurrent requests of concurrent workloads


def run_session(parts: EngineParts, plan: EngineBenchPlan, say: Say) -> EngineReport:
    """Measure everything that ``plan`` asks for. say: receives progress lines.

    Raises:
        BenchError: the arms returned different tokens, an engine failed, no workload is available, or the KV cache is
            too small for all arms.
    """
    began = time.perf_counter()
    report = EngineReport(engine_facts(parts.config, parts.info))
    report.fixed = tuple(arm.name for arm in plan.fixed)
    workloads = _workloads(parts, plan, report, say)
    engines = _engines(parts, plan.fixed)
    engine = engines[AUTO]
    check_room(parts, workloads, len(engines))
    sampling = SamplingParams(temperature=plan.temperature, seed=SEED)
    bench = EngineBench(engines, sampling, say)
    for workload in workloads:
        report.runs.append(bench.run(workload))
    if plan.off_cost:
        say("measuring the cost of speculation that is off")
        report.off_cost = OffCostBench(engine, parts).run()
    report.seconds = time.perf_counter() - began
    return report


def _engines(parts: EngineParts, fixed: Seq[Setting]) -> dict[Setting, Engine]:
    """One engine per arm, over the same weights, KV cache and drafters. Only auto writes its decisions to a file."""
    quiet = parts.config.speculation.model_copy(update={"trace_file": None})
    silent = dataclasses.replace(parts, config=parts.config.model_copy(update={"speculation": quiet}))
    return {arm: Engine(parts if arm is AUTO else silent) for arm in (OFF, AUTO, *fixed)}


def check_room(parts: EngineParts, workloads: Seq[Workload], arms: int) -> None:
    """Refuse a KV cache that cannot hold all arms: waiting for another arm's pages would count as time."""
    room = parts.kv.n_total * PAGE_SIZE
    for workload in workloads:
        for group in workload.groups:
            needed = arms * sum(map(_tokens, group))
            if needed > room:
                raise BenchError(
                    f"{workload.name}: {arms} arms need {needed} tokens of KV cache, which holds {room}; "
                    "raise engine.kv_tokens, or compare fewer settings"
                )


def _tokens(prompt: BenchPrompt) -> int:
    """Tokens of the whole text and a tree at its end."""
    return len(prompt.prompt_ids) + (prompt.stopping.max_tokens or 0) + PAGE_SIZE


def _workloads(parts: EngineParts, plan: EngineBenchPlan, report: EngineReport, say: Say) -> Seq[Workload]:
    """All workloads, created before any runs, so that errors come early."""

    def note(line: str) -> None:
        report.skipped.append(line)
        say(f"skipped {line}")

    found: list[Workload] = []
    for name in plan.workloads:
        try:
            found.append(make_workload(name, parts.tokenizer, plan.prompts, plan.max_tokens, note, plan.at_once))
        except WorkloadUnavailableError as error:
            note(f"{name}: {error}")
    if plan.workloads and not found:
        raise BenchError("nothing to measure: " + "; ".join(report.skipped))
    return found


def report_tables(report: EngineReport) -> Iterator[Table]:
    summaries = [runs.summary() for runs in report.runs]
    alone, together = [s for s in summaries if not s.concurrent], [s for s in summaries if s.concurrent]
    if alone:
        yield _workload_table(alone, "ms per token")
    if together:
        yield _workload_table(together, "tokens/s")
    if any(s.drafters for s in summaries):
        yield _drafter_table(summaries)
    if report.fixed:
        yield _fixed_table(report.runs, report.fixed)
    if report.off_cost is not None:
        yield _off_cost_table(report.off_cost)


def _workload_table(summaries: Seq[WorkloadSummary], unit: str) -> Table:
    together = unit == "tokens/s"
    title = f"speculation off and auto: {unit}; ratios above 1 are faster"
    if together:
        title = f"concurrent requests, off and auto: {unit} of all, while the maximal number runs"
    columns = ["prompts", OFF.name, AUTO.name, "total ratio", "median", "worst", "tokens/step"]
    table = Table("workload", *columns, title=title, caption="median, worst: of the prompts' ratios")
    for s in summaries:
        times = (per_second(s.base_ms), per_second(s.arm_ms)) if together else (s.base_ms, s.arm_ms)
        ratios = [s.total_ratio, s.ratio_median, s.worst, s.tokens_per_step]
        count = str(s.prompts) if s.timed == s.prompts else f"{s.prompts} ({s.timed} timed)"
        table.add_row(s.workload, count, *(in_cell(t, 1) for t in times), *(in_cell(r, 2) for r in ratios))
    return table


def _drafter_table(summaries: Seq[WorkloadSummary]) -> Table:
    names = sorted({name for s in summaries for name in s.drafters})
    table = Table("workload", *names, title="accepted share of verified draft nodes, by drafter (auto)")
    for s in summaries:
        parts = [s.drafters.get(name) for name in names]
        shares = [f"{part.draft_acceptance_rate:.0%} of {part.num_draft_tokens}" if part else "-" for part in parts]
        table.add_row(s.workload, *shares)
    return table


def _fixed_table(runs: Seq[WorkloadRuns], fixed: Seq[str]) -> Table:
    title = "ms per token by setting (depth x width / nodes), from off's first token; concurrent: of all requests"
    table = Table("workload", OFF.name, AUTO.name, *fixed, "best fixed", "its time over auto's", title=title)
    for run in runs:
        figures, best = fixed_figures(run, fixed), best_fixed(run, fixed)
        last = (best["setting"], f"{best['over_auto']:.2f}") if best is not None else ("-", "-")
        table.add_row(run.workload, *(in_cell(figures[arm], 1) for arm in figures), *last)
    return table


def _off_cost_table(cost: OffCost) -> Table:
    table = Table("figure", "value", title="speculation off: engine with drafters over engine without")
    for name, value in cost.as_dict().items():
        table.add_row(name, str(value))
    return table
