"""`specdec bench frontend`: what the server costs beside the engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

LIMITS = {"added_ttft_ms": 1.0, "cpu_ms_per_message": 0.15, "cpu_share": 0.15}


@click.command("frontend")
@click.option("--face", "faces", type=click.Choice(["grpc", "http"]), multiple=True, help="Default: both.")
@click.option("--requests", type=click.IntRange(min=4), default=60, show_default=True, help="One stream at a time.")
@click.option("--messages", type=click.IntRange(min=2), default=60, show_default=True, help="Of each request.")
@click.option("--step-ms", type=click.FloatRange(min=0.5), default=4.0, show_default=True, help="Between messages.")
@click.option(
    "--streams", type=click.IntRange(min=1), default=64, show_default=True, help="At once, in the second part."
)
@click.option(
    "--busy-step-ms",
    type=click.FloatRange(min=1),
    default=50.0,
    show_default=True,
    help="Between messages of a stream, in the second part.",
)
@click.option("--seconds", type=click.FloatRange(min=2), default=10.0, show_default=True, help="Of the second part.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def frontend_command(faces: tuple[str, ...], as_json: bool, **plan: Any) -> None:
    """Time and processor that the front end takes, with an engine that takes none."""
    from rich.console import Console
    from rich.table import Table

    from bench.frontend.frontend_bench import FACES, FrontendPlan, measure_frontend

    figures = asyncio.run(measure_frontend(FrontendPlan(faces=faces or FACES, **plan)))
    if as_json:
        click.echo(json.dumps(figures))
        return
    names = list(next(iter(figures.values())))
    table = Table("figure", *figures, "limit", title="the front end's own cost")
    for name in names:
        table.add_row(name, *(_cell(found[name]) for found in figures.values()), str(LIMITS.get(name, "")))
    Console().print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['p50']:.3f} (p90 {value['p90']:.3f}, p99 {value['p99']:.3f})"
    return str(value)
