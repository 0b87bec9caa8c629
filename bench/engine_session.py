"""One whole run of `specdec bench engine`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.engine_arm import AUTO, OFF, Arm
from bench.engine_bench import EngineBench, Say
from bench.engine_bench_error import BenchError
from bench.engine_machine import machine_facts
from bench.engine_off_cost import OffCostBench
from bench.engine_report import EngineReport
from bench.engine_runner import EngineRunner
from bench.workloads.batch import batch_prompts
from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.make import make_workload
from bench.workloads.workload import Workload
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.engine.engine import Engine, EngineParts
from specdec.types import SamplingParams
from verify_kernels.forward_batch import PAGE_SIZE

SEED = 20_26


@dataclass(frozen=True, slots=True)
class EngineBenchPlan:
    """What to measure. ``max_tokens`` None: each workload's own limit. ``fixed``: arms to run beside off and auto.
    ``batch``: sequences at once for the controller's time, beside those of the workloads; 0: none."""

    workloads: tuple[str, ...]
    prompts: int = 8
    max_tokens: int | None = None
    temperature: float = 0.0
    fixed: tuple[Arm, ...] = ()
    off_cost: bool = False
    control_time: bool = False
    batch: int = 0


def run_session(parts: EngineParts, plan: EngineBenchPlan, say: Say) -> EngineReport:
    """All that ``plan`` asks for. ``say`` gets a line now and then.

    Raises:
        BenchError: the arms gave different tokens, an engine failed, not one workload could be run, or the KV cache is
            too small for all arms at once.
    """
    began = time.perf_counter()
    report = EngineReport(machine_facts(parts.config, parts.info))
    report.fixed = tuple(arm.name for arm in plan.fixed)
    workloads = _workloads(parts, plan, report, say)
    engines = _engines(parts, plan.fixed)
    engine = engines[AUTO]
    _check_room(parts, workloads, len(engines))
    sampling = SamplingParams(temperature=plan.temperature, seed=SEED)
    bench = EngineBench(engines, sampling, say)
    for workload in workloads:
        report.runs.append(bench.run(workload))
    if plan.batch:
        say(f"batch: {plan.batch} sequences at once")
        EngineRunner(engine, sampling).run(batch_prompts(parts.tokenizer, plan.batch), AUTO, "batch")
        bench.control_times.collect(engine)
    if plan.control_time or plan.batch:
        report.control_times = bench.control_times
    report.reliability = engine.reliability()
    if plan.off_cost:
        say("cost of speculation that is off")
        report.off_cost = OffCostBench(engine, parts).run()
    report.seconds = time.perf_counter() - began
    return report


def _engines(parts: EngineParts, fixed: Seq[Arm]) -> dict[Arm, Engine]:
    """One per arm, all over the same weights, KV cache and drafters. Only auto's decisions are written to a file."""
    quiet = parts.config.speculation.model_copy(update={"trace_file": None})
    silent = dataclasses.replace(parts, config=parts.config.model_copy(update={"speculation": quiet}))
    return {arm: Engine(parts if arm is AUTO else silent) for arm in (OFF, AUTO, *fixed)}


def _check_room(parts: EngineParts, workloads: Seq[Workload], arms: int) -> None:
    """A sequence that waits for another arm's pages, or whose prompt lost its own to one, would be measured as slow."""
    room = parts.kv.n_total * PAGE_SIZE
    for workload in workloads:
        for group in workload.groups:
            needed = arms * sum(map(_tokens, group))
            if needed > room:
                raise BenchError(
                    f"{workload.name}: {arms} arms at once need {needed} tokens of KV cache, which holds {room}; "
                    "set engine.kv_tokens to more, or compare fewer settings"
                )


def _tokens(prompt: BenchPrompt) -> int:
    """Room for the whole text, and for a tree at its end."""
    return len(prompt.prompt_ids) + (prompt.stopping.max_tokens or 0) + PAGE_SIZE


def _workloads(parts: EngineParts, plan: EngineBenchPlan, report: EngineReport, say: Say) -> Seq[Workload]:
    """All of them before any is run: what is wrong with one is said at once."""

    def note(line: str) -> None:
        report.skipped.append(line)
        say(f"skipped {line}")

    found: list[Workload] = []
    for name in plan.workloads:
        try:
            found += make_workload(name, parts.tokenizer, plan.prompts, plan.max_tokens, note)
        except WorkloadUnavailableError as error:
            note(f"{name}: {error}")
    if plan.workloads and not found:
        raise BenchError("nothing to measure: " + "; ".join(report.skipped))
    return found
