"""`specdec bench`: measurements a user can repeat."""

from __future__ import annotations

import json

import click

from specdec.cli.options import engine_options
from specdec.config import EngineConfig


@click.group("bench")
def bench_group() -> None:
    """Measure this machine with a real model."""


@bench_group.command("step")
@engine_options
@click.option("--repeats", default=15, show_default=True, help="Interleaved repeats; medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def step_command(engine_config: EngineConfig, repeats: int, as_json: bool) -> None:
    """One forward by rows and context, prefill, and what is not the forward."""
    from rich.console import Console
    from rich.table import Table

    from bench.step_bench import StepBench
    from specdec.engine.build import build_parts
    from specdec.models.progress_bar import ProgressBar

    with ProgressBar() as progress:
        parts = build_parts(engine_config, progress)
    figures = StepBench(parts, engine_config).run(repeats).as_dict()
    figures |= {"target": parts.info.target, "dtype": parts.info.dtype, "threads": parts.info.threads}
    if as_json:
        click.echo(json.dumps(figures))
        return
    table = Table("context", *figures["step_ms"][next(iter(figures["step_ms"]))], title="ms per forward, by rows")
    for context, row in figures["step_ms"].items():
        table.add_row(context, *(f"{ms:.2f}" for ms in row.values()))
    console = Console()
    console.print(table)
    for name, value in figures.items():
        if name != "step_ms":
            console.print(f"{name:24} {value}")
