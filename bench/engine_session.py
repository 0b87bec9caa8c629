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

from bench.engine_bench import BenchError, EngineBench, EngineRunner, Say, WorkloadRuns, run_interleaved
from bench.engine_runs import AUTO, OFF, Setting
from bench.machine import engine_facts
from bench.workloads.make import make_workload
from bench.workloads.workload import Workload, WorkloadUnavailableError, long_text
from specdec.core.types import DrafterStats, SamplingParams
from specdec.engine.engine import Engine, EngineParts
from specdec.load.figures import FigureTable, in_cell, rounded
from specdec.load.request import LoadRequest
from verify_kernels.forward_batch import PAGE_SIZE

OFF_COST_REQUESTS = 8
OFF_COST_TOKENS = 64  # of each answer
OFF_COST_PROMPT = 128  # tokens


def off_cost(loaded: Engine, parts: EngineParts) -> dict[str, float]:
    """Milliseconds per decode step of an engine with drafters and of one without, speculation off in both, by name of
    the figure. Ratios are of the engine with drafters over the one without: 1.01 is a cost of 1 %.

    The engines decode real prompts greedily over one decoder and KV cache, step by step in turns.
    """
    speculation = parts.config.speculation.model_copy(update={"enabled": False, "trace_file": None})
    config = parts.config.model_copy(update={"speculation": speculation})
    bare = Engine(dataclasses.replace(parts, drafters=(), config=config, trace_steps=0))
    runners = [EngineRunner(engine, SamplingParams(temperature=0.0)) for engine in (loaded, bare)]
    tokens = parts.tokenizer.encode(long_text())
    answers: list[list[list[float]]] = []  # per answer, the milliseconds of the steps of both engines
    for number in range(OFF_COST_REQUESTS + 1):
        start = number * OFF_COST_PROMPT % max(1, len(tokens) - OFF_COST_PROMPT)
        ids = tuple(tokens[start : start + OFF_COST_PROMPT])
        prompt = LoadRequest(f"off-cost-{number}", OFF_COST_TOKENS, ids=ids, fixed=True)
        runs = [runner.start([prompt], OFF, f"off-cost/{place}") for place, runner in enumerate(runners)]
        run_interleaved(runs)
        answers.append([run.steps_ms[1 - OFF_COST_TOKENS :] for run in runs])
    with_drafters, without = zip(*answers[1:], strict=True)  # the first is a warm-up
    loaded_ms, bare_ms = list(chain(*with_drafters)), list(chain(*without))
    loaded_step_ms, bare_step_ms = statistics.median(loaded_ms), statistics.median(bare_ms)
    tpot_ms = [statistics.median(map(statistics.fmean, found)) for found in (with_drafters, without)]
    return {
        "steps": len(loaded_ms),
        "loaded_step_ms": round(loaded_step_ms, 4),
        "bare_step_ms": round(bare_step_ms, 4),
        "step_ratio_of_medians": round(loaded_step_ms / bare_step_ms, 4),
        "step_median_of_ratios": round(statistics.median(a / b for a, b in zip(loaded_ms, bare_ms, strict=True)), 4),
        "tpot_ratio_of_medians": round(tpot_ms[0] / tpot_ms[1], 4),
    }


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
    off_cost: dict[str, float] | None = None  # None unless the plan asks for it
    stopped: bool = False  # by Ctrl-C, before its end
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, including every prompt's, as JSON types."""
        figures: dict[str, Any] = {
            "machine": self.machine,
            "seconds": round(self.seconds, 1),
            "stopped": self.stopped,
            "skipped": self.skipped,
            "workloads": {runs.workload: runs.summary() for runs in self.runs},
        }
        if self.fixed:
            figures["fixed_ms_per_token"] = {runs.workload: fixed_figures(runs, self.fixed) for runs in self.runs}
            figures["auto_against_best_fixed"] = {runs.workload: best_fixed(runs, self.fixed) for runs in self.runs}
        if self.off_cost is not None:
            figures["off_cost"] = self.off_cost
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
    """Measure what ``plan`` asks for. say: receives progress lines. After Ctrl-C the report has what was measured
    until then, if that is anything.

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
    try:
        for workload in workloads:
            report.runs.append(runs := WorkloadRuns(workload.name, workload.concurrent))
            for by_arm in bench.rounds(workload):
                runs.rounds.append(by_arm)
        if plan.off_cost:
            say("measuring the cost of speculation that is off")
            report.off_cost = off_cost(engine, parts)
    except KeyboardInterrupt:
        report.runs, report.stopped = [runs for runs in report.runs if runs.rounds], True
        if not report.runs:
            raise
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
            # Each holds the whole text and a tree at its end.
            needed = arms * sum(len(prompt.ids) + prompt.max_tokens + PAGE_SIZE for prompt in group)
            if needed > room:
                raise BenchError(
                    f"{workload.name}: {arms} arms need {needed} tokens of KV cache, which holds {room}; "
                    "raise engine.kv_tokens, or compare fewer settings"
                )


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


def report_tables(report: EngineReport) -> Iterator[FigureTable]:
    for together, unit, title in (
        (False, "ms_per_token", "speculation off and auto: ms per token; ratios above 1 are faster"),
        (True, "tokens_per_s", "concurrent requests, off and auto: tokens/s of all, while the maximal number runs"),
    ):
        rows = [_workload_row(runs, unit) for runs in report.runs if runs.concurrent == together]
        if rows:
            columns = ["workload", "prompts", OFF.name, AUTO.name, "total ratio", "median", "worst", "tokens/step"]
            yield FigureTable(columns, rows, title, "median, worst: of the prompts' ratios")
    drafters = {runs.workload: runs.drafters(AUTO.name) for runs in report.runs}
    if names := sorted({name for by_name in drafters.values() for name in by_name}):
        rows = [[workload, *(_share(by_name.get(name)) for name in names)] for workload, by_name in drafters.items()]
        yield FigureTable(["workload", *names], rows, "accepted share of verified draft nodes, by drafter (auto)")
    if report.fixed:
        yield _fixed_table(report.runs, report.fixed)
    if report.off_cost is not None:
        rows = [[name, str(value)] for name, value in report.off_cost.items()]
        yield FigureTable(["figure", "value"], rows, "speculation off: engine with drafters over engine without")


def _workload_row(runs: WorkloadRuns, unit: str) -> list[str]:
    s = runs.summary()
    count = str(s["prompts"]) if s["timed"] == s["prompts"] else f"{s['prompts']} ({s['timed']} timed)"
    times = (in_cell(s[f"{arm}_{unit}"], 1) for arm in (OFF.name, AUTO.name))
    ratios = (in_cell(s[name], 2) for name in ("ratio_total", "ratio_median", "ratio_worst", "tokens_per_step"))
    return [runs.workload, count, *times, *ratios]


def _share(part: DrafterStats | None) -> str:
    return f"{part.draft_acceptance_rate:.0%} of {part.num_draft_tokens}" if part else "-"


def _fixed_table(runs: Seq[WorkloadRuns], fixed: Seq[str]) -> FigureTable:
    title = "ms per token by setting (depth x width / nodes), from off's first token; concurrent: of all requests"
    rows = []
    for run in runs:
        figures, best = fixed_figures(run, fixed), best_fixed(run, fixed)
        last = (best["setting"], f"{best['over_auto']:.2f}") if best is not None else ("-", "-")
        rows.append([run.workload, *(in_cell(figures[arm], 1) for arm in figures), *last])
    return FigureTable(["workload", OFF.name, AUTO.name, *fixed, "best fixed", "its time over auto's"], rows, title)
