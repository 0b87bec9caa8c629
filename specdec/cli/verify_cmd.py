"""`specdec verify`: decode plainly, decode in company, compare exactly."""

from __future__ import annotations

import json
import sys
import time

import click

from specdec.cli.options import engine_options
from specdec.config import EngineConfig


@click.command("verify")
@engine_options
@click.option("-n", "--pairs", default=120, show_default=True, help="Request pairs to compare at least.")
@click.option("--max-tokens", default=40, show_default=True, help="Longest output of one request.")
@click.option("--seed", default=0, show_default=True, help="Chooses prompts, parameters and seeds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def verify_command(engine_config: EngineConfig, pairs: int, max_tokens: int, seed: int, as_json: bool) -> None:
    """Check path identity: the same tokens and log-probabilities with and without speculation, in any company."""
    from rich.console import Console

    from specdec.engine.build import build_parts
    from specdec.models.progress_bar import ProgressBar
    from specdec.verify.session import verify

    console = Console(stderr=True)
    began = time.perf_counter()
    with ProgressBar() as progress:
        parts = build_parts(engine_config, progress)
    report = verify(parts, pairs=pairs, max_tokens=max_tokens, seed=seed, say=console.print)
    seconds = time.perf_counter() - began
    if as_json:
        click.echo(json.dumps({**report.as_dict(), "seconds": round(seconds, 1)}))
    else:
        Console().print(report.table())
        for mismatch in report.mismatches[:1]:
            click.echo(f"first mismatch: {mismatch}")
        click.echo(
            f"{report.pairs} pairs, {report.tokens} tokens, {report.accepted} of them drafted, "
            f"{report.preemptions} preemptions, {len(report.mismatches)} mismatches ({seconds:.0f} s, "
            f"{parts.info.numeric_mode})"
        )
    sys.exit(1 if report.mismatches else 0)
