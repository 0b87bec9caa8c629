"""`specdec bench`: measurements a user can repeat."""

from __future__ import annotations

import json

import click

from specdec.cli.bench_engine_cmd import engine_command
from specdec.cli.bench_experiments_cmd import experiments_command
from specdec.cli.bench_faults_cmd import faults_command
from specdec.cli.bench_frontend_cmd import frontend_command
from specdec.cli.bench_overload_cmd import overload_command
from specdec.cli.bench_peers_cmd import peers_command
from specdec.cli.bench_serve_cmd import serve_load_command
from specdec.cli.bench_soak_cmd import soak_command
from specdec.cli.bench_typing_cmd import typing_command
from specdec.cli.options import engine_options
from specdec.config import EngineConfig


@click.group("bench")
def bench_group() -> None:
    """Measure this machine with a real model."""


bench_group.add_command(engine_command)
bench_group.add_command(serve_load_command)
bench_group.add_command(frontend_command)
bench_group.add_command(typing_command)
bench_group.add_command(overload_command)
bench_group.add_command(soak_command)
bench_group.add_command(faults_command)
bench_group.add_command(peers_command)
bench_group.add_command(experiments_command)


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


@bench_group.command("perplexity")
@engine_options
@click.option(
    "--tokens", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of real text to score."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def perplexity_command(engine_config: EngineConfig, tokens: int, as_json: bool) -> None:
    """Perplexity in each numeric type, and its ratio to fp32."""
    from bench.perplexity import perplexity
    from specdec.engine.build import build_parts
    from specdec.models.progress_bar import ProgressBar

    found: dict[str, float] = {}
    for dtype in ("fp32", "bf16", "int8"):
        with ProgressBar() as progress:
            parts = build_parts(engine_config.model_copy(update={"dtype": dtype}), progress)
        found[dtype] = perplexity(parts, tokens)
        del parts  # or two models would be in memory at once
    figures = {f"{dtype}_perplexity": round(value, 4) for dtype, value in found.items()}
    figures |= {f"{dtype}_over_fp32": round(found[dtype] / found["fp32"], 5) for dtype in ("bf16", "int8")}
    if as_json:
        click.echo(json.dumps({"target": engine_config.target, "tokens": tokens, **figures}))
        return
    for name, figure in figures.items():
        click.echo(f"{name:18} {figure}")
