"""`specdec bench experiments`: what a running experiment takes of each request."""

from __future__ import annotations

import json

import click

LIMITS_US = {"assign": 20.0, "record": 50.0}


@click.command("experiments")
@click.option("--requests", type=click.IntRange(min=100), default=5000, show_default=True, help="For each figure.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def experiments_command(requests: int, prompt_tokens: int, as_json: bool) -> None:
    """Time that a running experiment takes to give a request its arm, and to write its record."""
    from rich.console import Console
    from rich.table import Table

    from bench.experiment_cost import ExperimentCost

    figures = ExperimentCost(requests, prompt_tokens).run()
    if as_json:
        click.echo(json.dumps(figures))
        return
    table = Table("figure", "p50", "p99", "limit", title=f"microseconds a request, prompts of {prompt_tokens} tokens")
    for name, found in figures.items():
        limit = LIMITS_US.get(name.partition("_")[0], "")
        table.add_row(name, f"{found['p50_us']:.1f}", f"{found['p99_us']:.1f}", str(limit))
    Console().print(table)
