"""`specdec bench typing`: what an editor's session is worth to somebody who types."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from specdec.cli.options import engine_options
from specdec.config import EngineConfig


@click.command("typing")
@engine_options
@click.option("--keys", type=click.IntRange(min=8), default=80, show_default=True, help="Of each stretch of text.")
@click.option("--keys-per-s", type=click.FloatRange(min=0.5), default=8.0, show_default=True)
@click.option("--stretches", type=click.IntRange(1, 6), default=2, show_default=True, help="Each of another file.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Longest suggestion.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def typing_command(engine_config: EngineConfig, as_json: bool, **plan: Any) -> None:
    """Type real files key by key, through a session and with a request per key; compare the waits."""
    from rich.console import Console
    from rich.table import Table

    from bench.typing.typing_bench import TypingPlan, measure_typing

    progress = Console(stderr=True)
    figures = asyncio.run(
        measure_typing(engine_config, TypingPlan(**plan), lambda line: progress.print(line, style="dim"))
    )
    if as_json:
        click.echo(json.dumps(figures))
        return
    table = Table("figure", "session", "requests", title=f"{figures['target']}: waiting for a suggestion, ms")
    for name in ("p50", "p90", "p99", "max"):
        table.add_row(f"wait {name}", *(f"{figures[arm]['wait_ms'][name]:.1f}" for arm in ("session", "requests")))
    for name in ("keys", "answered", "answered_with_text", "answered_before_next_key", "continued"):
        table.add_row(name, *(str(figures[arm][name]) for arm in ("session", "requests")))
    console = Console()
    console.print(table)
    for name in ("p50_ratio", "p50_ratio_text", "p50_ratio_by_stretch", "pages_before", "pages_after", "pages_lost"):
        console.print(f"{name:22} {figures[name]}", highlight=False)
