"""The tables of `specdec bench engine`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from rich.table import Table

from bench.engine_arm import AUTO, OFF
from bench.engine_control_times import ControlTimes
from bench.engine_fixed import best_fixed, fixed_figures
from bench.engine_off_cost import OffCost
from bench.engine_report import EngineReport
from bench.engine_workload_runs import WorkloadRuns
from bench.engine_workload_summary import WorkloadSummary, per_second
from bench.reliability import reliability_table


def report_tables(report: EngineReport) -> Iterator[Table]:
    """Every table that ``report`` has figures for."""
    summaries = [runs.summary() for runs in report.runs]
    alone, together = [s for s in summaries if not s.concurrent], [s for s in summaries if s.concurrent]
    if alone:
        yield _workloads(alone, "ms per token")
    if together:
        yield _workloads(together, "tokens/s")
    if summaries:
        yield _drafters(summaries)
    if report.fixed:
        yield _fixed(report.runs, report.fixed)
    if report.off_cost is not None:
        yield _off_cost(report.off_cost)
    if report.control_times is not None:
        yield _control(report.control_times)
    if any(report.reliability.values()):
        yield reliability_table(report.reliability)


def _workloads(summaries: Seq[WorkloadSummary], unit: str) -> Table:
    together = unit == "tokens/s"
    title = f"speculation off and auto: {unit}; ratios above 1 are faster"
    if together:
        title = f"requests at once, off and auto: {unit} of all of them together, while all places are taken"
    columns = ["prompts", OFF.name, AUTO.name, "total ratio", "median", "p10", "p90", "worst", "tokens/step"]
    columns += ["with the end"] if together else []
    table = Table("workload", *columns, title=title, caption="median to worst: per prompt")
    for s in summaries:
        times = (per_second(s.base_ms), per_second(s.arm_ms)) if together else (s.base_ms, s.arm_ms)
        ratios = [s.total_ratio, s.ratio_median, s.ratio_p10, s.ratio_p90, s.worst, s.tokens_per_step]
        ratios += [s.whole_ratio] if together else []
        count = str(s.prompts) if s.timed == s.prompts else f"{s.prompts} ({s.timed} timed)"
        table.add_row(s.workload, count, *(_number(t, 1) for t in times), *(_number(r, 2) for r in ratios))
    return table


def _drafters(summaries: Seq[WorkloadSummary]) -> Table:
    names = sorted({name for s in summaries for name in s.drafters})
    table = Table("workload", *names, title="accepted of verified draft nodes, by drafter (auto)")
    for s in summaries:
        cells = []
        for name in names:
            part = s.drafters.get(name)
            cells.append(
                f"{part.draft_acceptance_rate:.0%} of {part.num_draft_tokens}"
                if part is not None and part.num_draft_tokens
                else "-"
            )
        table.add_row(s.workload, *cells)
    return table


def _fixed(runs: Seq[WorkloadRuns], fixed: Seq[str]) -> Table:
    title = "ms per token by setting (depth x width / nodes); at once: of all requests together"
    table = Table("workload", OFF.name, AUTO.name, *fixed, "best fixed", "its time over auto's", title=title)
    for run in runs:
        figures, best = fixed_figures(run, fixed), best_fixed(run, fixed)
        last = (best["setting"], f"{best['over_auto']:.2f}") if best is not None else ("-", "-")
        table.add_row(run.workload, *(_number(figures[arm], 1) for arm in figures), *last)
    return table


def _off_cost(cost: OffCost) -> Table:
    table = Table("figure", "value", title="speculation off: drafters loaded, over an engine without any")
    for name, value in cost.as_dict().items():
        table.add_row(name, str(value))
    return table


def _control(times: ControlTimes) -> Table:
    table = Table("sequences", "steps", "median ms", "p99 ms", title="the controller's own time per step (auto)")
    for row in times.rows():
        table.add_row(str(row.sequences), str(row.steps), f"{row.median_ms:.3f}", f"{row.p99_ms:.3f}")
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
