"""`specdec bench overload`: several times as much as the server can do."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from bench.serve import SERVE_WORKLOADS
from specdec.cli.options import server_options
from specdec.config import Config

LEAST_GOODPUT, MOST_GROWTH_MIB = 0.9, 32.0


@click.command("overload")
@server_options
@click.option("--workload", type=click.Choice(SERVE_WORKLOADS), default="humaneval", show_default=True)
@click.option(
    "--level",
    "levels",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4, 8, 16, 32),
    show_default=True,
    help="Requests at once in the closed loops that find the peak; may be repeated.",
)
@click.option(
    "--peak-seconds", "peak_s", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Of each."
)
@click.option(
    "--settle-seconds", "settle_s", type=click.FloatRange(min=0), default=8.0, show_default=True,
    help="Before these, which do not count.",
)  # fmt: skip
@click.option("--factor", type=click.FloatRange(min=1), default=4.0, show_default=True, help="Arrivals over the peak.")
@click.option("--minutes", type=click.FloatRange(min=0.05), default=3.0, show_default=True, help="Of overload.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(min=0.1),
    help="Seconds, sent with every request; default: the e2e objective.",
)  # fmt: skip
@click.option("--goodput", multiple=True, help="METRIC:MS; default: e2e, twice the p99 of the least level at the peak.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def overload_command(config: Config, goodput: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Start a server, find what it can do, ask for several times that; see what becomes of it.

    Exit code 1: it did not keep at least 90 % of its peak, refused without saying when to come back, let requests in
    that it could not serve in time, or grew; 2: the load generator itself could not keep up."""
    from rich.console import Console

    from bench.overload.overload_bench import measure_overload
    from bench.overload.overload_plan import OverloadPlan
    from bench.serve.objective import Objective

    plan = OverloadPlan(objectives=tuple(Objective.read(text) for text in goodput), **options)
    progress = Console(stderr=True)
    server = config.server.model_copy(update={"host": "127.0.0.1", "grpc_port": 0, "http_port": None})
    config = config.model_copy(update={"server": server})
    figures = asyncio.run(measure_overload(config, plan, lambda line: progress.print(line, style="dim")))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        _print(figures)
    faults = figures["overload"]["faults"]
    sys.exit(2 if faults else 1 if any(not kept for _, _, _, kept in _questions(figures)) else 0)


def _questions(figures: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What is asked, what was found, what is wanted, and whether it was."""
    share, hintless = figures["goodput_over_peak"], figures["refused_without_hint"]
    kept = share is not None and share >= LEAST_GOODPUT
    found = [
        ("goodput over the peak's", str(share), f"at least {LEAST_GOODPUT}", kept),
        ("refused without a hint", str(hintless), "0", hintless == 0),
    ]
    for limit, over in figures["admitted_p99_over_objective"].items():
        told = "beyond: more than 1 % were lost" if over is None else str(over)
        found.append((f"p99 of those let in, over {limit}", told, "at most 1", over is not None and over <= 1))
    for name, grown in figures["memory"]["growth_mib"].items():
        told = f"at most {MOST_GROWTH_MIB:g}"
        found.append((f"{name} grew, MiB", str(grown), told, grown <= MOST_GROWTH_MIB))
    return found


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    plan, peak = figures["plan"], figures["peak"]
    console = Console()
    console.print(
        f"peak: {peak['good_tokens_per_s']} good tokens/s, {peak['requests_per_s']} requests/s, from {peak['at_once']} "
        f"at once on; tokens/s by level: {peak['tokens_per_s_by_level']}", highlight=False,
    )  # fmt: skip
    table = Table("question", "found", "wanted", "", title=f"{plan['factor']:g} x the peak for {plan['minutes']:g} min")
    for question, found, wanted, kept in _questions(figures):
        table.add_row(question, found, wanted, "yes" if kept else "NO")
    console.print(table)
    for name in ("goodput_over_peak_with_begin", "admitted", "refused", "lost", "late_share"):
        console.print(f"{name:30} {figures[name]}", highlight=False)
    for line in figures["overload"]["faults"]:
        console.print(f"INVALID {line}", style="red", markup=False, highlight=False)
