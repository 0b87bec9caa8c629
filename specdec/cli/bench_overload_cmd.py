"""`specdec bench overload`: several times as much as the server can do."""

from __future__ import annotations

import asyncio
import json

import click

from bench.serve import SERVE_WORKLOADS
from specdec.cli.options import server_options
from specdec.config import Config


@click.command("overload")
@server_options
@click.option("--workload", type=click.Choice(SERVE_WORKLOADS), default="humaneval", show_default=True)
@click.option(
    "--level",
    "levels",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4, 8, 16),
    show_default=True,
    help="Requests at once in the closed loops that find the peak; may be repeated.",
)
@click.option("--peak-seconds", type=click.FloatRange(min=1), default=15.0, show_default=True, help="Of each of them.")
@click.option("--factor", type=click.FloatRange(min=1), default=4.0, show_default=True, help="Arrivals over the peak.")
@click.option("--minutes", type=click.FloatRange(min=0.05), default=3.0, show_default=True, help="Of overload.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option(
    "--deadline", type=click.FloatRange(min=0.1), help="Seconds, sent with every request; default: the e2e objective."
)
@click.option("--goodput", "goodput", multiple=True, help="METRIC:MS; default: e2e, twice the peak's p99.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def overload_command(
    config: Config, workload: str, levels: tuple[int, ...], peak_seconds: float, factor: float, minutes: float,
    max_tokens: int, deadline: float | None, goodput: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Start a server, find what it can do, ask for several times that; see what becomes of it."""
    from rich.console import Console
    from rich.table import Table

    from bench.overload.overload_bench import measure_overload
    from bench.overload.overload_plan import OverloadPlan
    from bench.serve.objective import Objective

    objectives = tuple(Objective.read(text) for text in goodput)
    plan = OverloadPlan(
        workload=workload, levels=levels, peak_s=peak_seconds, factor=factor, minutes=minutes, max_tokens=max_tokens,
        deadline_s=deadline, objectives=objectives,
    )  # fmt: skip
    progress = Console(stderr=True)
    server = config.server.model_copy(update={"host": "127.0.0.1", "grpc_port": 0, "http_port": None})
    config = config.model_copy(update={"server": server})
    figures = asyncio.run(measure_overload(config, plan, lambda line: progress.print(line, style="dim")))
    if as_json:
        click.echo(json.dumps(figures))
        return
    table = Table("figure", "value", title=f"{factor:g} times the peak for {minutes:g} minutes")
    for name in ("goodput_over_peak", "refused", "refused_without_hint", "lost"):
        table.add_row(name, str(figures[name]))
    for limit, share in figures["admitted_p99_over_objective"].items():
        table.add_row(f"p99 over {limit}", "beyond" if share is None else str(share))
    for name, grown in figures["memory"]["growth_mib"].items():
        table.add_row(f"{name} grew, MiB", str(grown))
    for line in figures["overload"]["faults"]:
        table.add_row("INVALID", line)
    Console().print(table)
