"""`specdec bench engine`: speculation on and off, side by side, on real prompts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from bench.engine_arm import FIXED_GRID
from bench.workloads import WORKLOAD_NAMES
from specdec.cli.options import engine_options
from specdec.config import EngineConfig

AT_ONCE = 8
ARM_TOKENS = 20480  # of KV cache: all arms run at the same time


@click.command("engine")
@engine_options
@click.option(
    "--workload", "workloads", type=click.Choice(WORKLOAD_NAMES), multiple=True,
    help="May be repeated; default: all of them.",
)  # fmt: skip
@click.option("--prompts", type=click.IntRange(min=1), default=8, show_default=True, help="Per workload.")
@click.option("--max-tokens", type=click.IntRange(min=8), help="Longest output, instead of each workload's own limit.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: greedy.")
@click.option("--fixed", is_flag=True, help="Also run a grid of fixed settings; takes some four times as long.")
@click.option(
    "--setting", "settings", type=click.Choice([arm.name for arm in FIXED_GRID]), multiple=True,
    help="Also run this one of them, depth x width / nodes; may be repeated.",
)  # fmt: skip
@click.option("--off-cost", is_flag=True, help="Also measure what speculation costs where it is off.")
@click.option("--control-time", is_flag=True, help="Also report the controller's own time per step.")
@click.option("--batch", type=click.IntRange(1, 256), help="With it: the controller's time with so many sequences too.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write every figure there.")
def engine_command(
    engine_config: EngineConfig,
    workloads: tuple[str, ...],
    prompts: int,
    max_tokens: int | None,
    temperature: float,
    fixed: bool,
    settings: tuple[str, ...],
    off_cost: bool,
    control_time: bool,
    batch: int | None,
    path: Path | None,
) -> None:
    """Time per token with speculation off and auto: the same requests, one engine, one set of weights."""
    from rich.console import Console

    from bench.engine_session import EngineBenchPlan, run_session
    from bench.engine_tables import report_tables
    from specdec.engine.build import build_parts
    from specdec.models.progress_bar import ProgressBar

    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"--json: {path.parent} is not a folder")
    at_once = max(engine_config.max_batch, batch or 0, AT_ONCE)
    rows = max(engine_config.max_step_rows, at_once)
    arms = tuple(arm for arm in FIXED_GRID if fixed or arm.name in settings)
    kv_tokens = max(engine_config.kv_tokens, ARM_TOKENS * (2 + len(arms)))
    sizes = {"max_batch": at_once, "max_step_rows": rows, "kv_tokens": kv_tokens}
    with ProgressBar() as progress:
        parts = build_parts(engine_config.model_copy(update=sizes), progress)
    progress_lines = Console(stderr=True)
    plan = EngineBenchPlan(
        workloads or WORKLOAD_NAMES, prompts, max_tokens, temperature, arms, off_cost, control_time, batch or 0
    )
    report = run_session(parts, plan, lambda line: progress_lines.print(line, style="dim", highlight=False))
    if path is not None:
        path.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    console = Console()
    for table in report_tables(report):
        console.print(table)
    for line in report.skipped:
        console.print(f"skipped {line}")
    for name in ("cpu", "cores", "read_bandwidth_gb_s", "target", "draft", "date", "commit"):
        console.print(f"{name:20} {report.machine[name]}", highlight=False)
    console.print(f"{'seconds':20} {report.seconds:.0f}")
