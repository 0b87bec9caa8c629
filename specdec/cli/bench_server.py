"""`specdec bench frontend`, `typing` and `edits`: each measures its own servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from bench.workloads import EDIT_ROADS
from specdec.cli.bench_output import (
    choices_option,
    count_option,
    json_option,
    number_option,
    print_figures,
    print_table,
    progress_line,
)
from specdec.cli.options import FiniteRange, engine_options
from specdec.config import EngineConfig
from specdec.load.figures import brief, spread_cells

LIMITS = {"added_ttft_ms": 1.0, "cpu_ms_per_message": 0.15, "cpu_share": 0.15}


@click.command("frontend")
@choices_option("--face", "protocols", of=("grpc", "http"), help="Default: both.")
@count_option("--requests", default=60, least=4, help="Requests of the first part, one at a time.")
@count_option("--streams", default=64, help="Concurrent streams of the second part.")
@number_option("--seconds", default=10.0, least=2, help="Duration of the second part.")
@json_option
def frontend_command(protocols: tuple[str, ...], as_json: bool, **plan: Any) -> None:
    """Measure the front end's latency and processor time. The engine computes nothing."""
    from bench.frontend.frontend_bench import PROTOCOLS, FrontendPlan, measure_frontend

    figures = asyncio.run(measure_frontend(FrontendPlan(protocols=protocols or PROTOCOLS, **plan)))
    if as_json:
        click.echo(json.dumps(figures))
        return
    rows = (
        [name, *(_cell(found[name]) for found in figures.values()), str(LIMITS.get(name, ""))]
        for name in next(iter(figures.values()))
    )
    print_table(["figure", *figures, "limit"], rows, "the front end's own cost")


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['p50']:.3f} (p90 {value['p90']:.3f}, p99 {value['p99']:.3f})"
    return str(value)


@click.command("typing")
@engine_options
@count_option("--keys", default=80, least=8, help="Keys per file.")
@click.option("--keys-per-s", type=FiniteRange(0.5, 10**9), default=8.0, show_default=True)
@click.option("--stretches", type=click.IntRange(1, 6), default=2, show_default=True, help="Number of files.")
@count_option("--max-tokens", default=32, help="Length limit of a suggestion.")
@json_option
def typing_command(engine_config: EngineConfig, as_json: bool, **plan: Any) -> None:
    """Type real files key by key, and time the suggestions."""
    from bench.typing_bench import TypingPlan, measure_typing

    figures = asyncio.run(measure_typing(engine_config, TypingPlan(**plan), progress_line()))
    if as_json:
        click.echo(json.dumps(figures))
        return
    rows = [[name, *spread_cells(figures[name], _SPREAD)] for name in ("wait_ms", "answer_ms")]
    print_table(("figure", *_SPREAD), rows, f"{figures['target']}: waiting for a suggestion")
    print_figures(figures, _TYPED, 26)


_TYPED = ("keys", "answered", "answered_with_text", "answered_before_next_key", "continued", "prompt_rows_per_key")
_SPREAD = ("n", "p50", "p90", "p99", "max")


@click.command("edits")
@engine_options
@count_option("--prompts", default=20, help="Edits, at most 29.")
@choices_option(
    "--road", "roads", of=EDIT_ROADS,
    help="May be repeated; default: all. llama.cpp gets PredictEdit's prompts; `make peers` installs it.",
)  # fmt: skip
@json_option
def edits_command(engine_config: EngineConfig, prompts: int, roads: tuple[str, ...], as_json: bool) -> None:
    """Predict real next edits with speculation off and auto.

    llama.cpp too, if installed. Each prompt is read before it counts, as in a running session. The edits are those
    between releases of packages that the first use fetches."""
    from rich.console import Console

    from bench.edits_bench import measure_edits
    from specdec.cli.progress_bar import progress_bars

    console = Console(stderr=True)
    with progress_bars(console) as progress:
        figures = asyncio.run(
            measure_edits(engine_config, prompts, roads or EDIT_ROADS, progress_line(console), progress)
        )
    if as_json:
        click.echo(json.dumps(figures))
        return
    arms = [(road, arm, found) for road, by_arm in figures["roads"].items() for arm, found in by_arm.items()]
    title = f"{figures['target']}: {figures['edits']} real edits"
    times = [[road, arm, *(_quantiles(found[name]) for name in _EDIT_TIMES)] for road, arm, found in arms]
    print_table(["road", "engine", *_EDIT_TIMES], times, f"{title}, p50 / p90, number")
    counts = [
        [road, arm, *("-" if found[name] is None else str(found[name]) for name in _EDIT_COUNTS)]
        for road, arm, found in arms
    ]
    print_table(["road", "engine", *_EDIT_COUNTS], counts, title)
    print_figures(figures, ("unchanged_lines_right",))
    for road, found in figures["over_off"].items():
        if found:
            click.echo(f"{road}: auto over off, p50 / p90, number {_quantiles(found)}")
    if figures["over_llama"]:
        click.echo(f"PredictEdit auto over llama.cpp, p50 / p90, number {_quantiles(figures['over_llama'])}")


_EDIT_TIMES = ("first_edit_ms", "whole_ms", "read_ms")
_EDIT_COUNTS = ("tokens", "tokens_per_step", "lines_right", "edits_right", "same_as_off")


def _quantiles(found: dict[str, float]) -> str:
    return f"{brief(found['p50'])} / {brief(found['p90'])}, {found['n']}" if found["n"] else "-"
