"""`specdec bench faults`: an engine that dies or hangs under load."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import click

from specdec.cli.options import server_options
from specdec.config import Config


@click.command("faults")
@server_options
@click.option("--way", "ways", type=click.Choice(["kill", "hang"]), multiple=True, help="Default: both.")
@click.option("--times", type=click.IntRange(1, 3), default=2, show_default=True, help="Of each; more is given up on.")
@click.option("--streams", type=click.IntRange(min=1), default=8, show_default=True, help="Over each face, at once.")
@click.option("--heartbeat", "heartbeat_s", type=click.FloatRange(min=0.5), default=5.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def faults_command(config: Config, ways: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Kill and stop the engine while streams run: does each end as unavailable, and how long is the server away?

    Exit code 1: a stream hung or broke, or the server took more than 5 s beside loading its model."""
    from rich.console import Console
    from rich.table import Table

    from bench.faults.faults_bench import measure_faults
    from bench.faults.faults_plan import FaultsPlan

    if ways:
        options["ways"] = ways
    plan = FaultsPlan(**options)
    progress = Console(stderr=True)
    figures = asyncio.run(measure_faults(config, plan, lambda line: progress.print(line, style="dim", markup=False)))
    if as_json:
        click.echo(json.dumps(figures))
        sys.exit(0 if figures["ok"] else 1)
    table = Table("fault", "streams ended as", "all ended, s", "serving again, s", "of that loading, s", "beside, s")
    for run in figures["runs"]:
        endings = ", ".join(f"{count} {ending}" for ending, count in run["streams"].items())
        times = (run["streams_ended_s"], run["serving_again_s"], run["load_s"], run["beside_load_s"])
        table.add_row(run["way"], endings, *(f"{seconds:.2f}" for seconds in times))
    console = Console()
    console.print(table)
    for fault in figures["faults"]:
        console.print(f"FAULT {fault}", style="red", markup=False, highlight=False)
    sys.exit(0 if figures["ok"] else 1)
