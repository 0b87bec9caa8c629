"""`specdec bench soak`: a server under mixed load for an hour; does it give back all that it takes?"""

from __future__ import annotations

import asyncio
import json
import sys

import click

from specdec.cli.options import server_options
from specdec.config import Config

# Texts that are kept to draft from take memory until there are so many of them, which is no leak, but takes hours.
_SMALL_STORES = {"session_tokens": 4096, "sessions": 8, "shared_tokens": 8192, "shared_salts": 4, "trace_steps": 256}


@click.command("soak")
@server_options
@click.option("--minutes", type=click.FloatRange(min=0.01), default=60.0, show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--shift", type=click.FloatRange(min=0.5), default=60.0, show_default=True, help="Seconds between looks.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of who does what; timing adds its own chance.")
@click.option("--full-stores", is_flag=True, help="Keep texts to draft from as configured, though they fill for hours.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def soak_command(
    config: Config, minutes: float, clients: int, shift: float, seed: int, full_stores: bool, as_json: bool
) -> None:
    """Put mixed load on a server of our own: streams, editors, cancels, clients that vanish. Exit code 1: it lost
    something, hung, or grew."""
    from rich.console import Console
    from rich.table import Table

    from bench.soak.look import Look
    from bench.soak.soak_bench import run_soak
    from bench.soak.soak_plan import SoakPlan
    from bench.soak.tally import Tally

    progress = Console(stderr=True)

    def seen(look: Look, tally: Tally) -> None:
        sizes = ", ".join(
            f"{name} {use.own_bytes / 2**20:.1f} MiB {use.files} files {use.threads} threads"
            for name, use in look.processes.items()
        )
        left = f"; held: {look.left}" if look.left else ""
        line = f"{look.at_s / 60:6.1f} min  {look.visits} visits  {tally.n_faults} faults  {sizes}{left}"
        progress.print(line, style="dim", highlight=False)

    plan = SoakPlan(minutes=minutes, clients=clients, shift_s=shift, seed=seed)
    figures = asyncio.run(run_soak(_own_server(config, full_stores), plan, seen)).as_dict()
    if as_json:
        click.echo(json.dumps(figures))
        sys.exit(0 if figures["ok"] else 1)
    console = Console()
    visits = Table("visit", "what became of it", title=f"{figures['visits']} visits in {minutes:g} minutes")
    for name, outcomes in figures["outcomes"].items():
        visits.add_row(name, ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    console.print(visits)
    for process, grown in figures["growth"].items():
        told = "too few looks to judge its memory" if grown is None else (
            f"{grown['mib']:+.2f} MiB after the warm-up ({grown['mib_per_hour']:+.2f} an hour) at "
            f"{grown['size_mib']} MiB; {grown['limit_mib']} are allowed"
        )  # fmt: skip
        console.print(f"{process}: {told}", highlight=False)
    for fault in figures["faults"]:
        console.print(f"FAULT {fault}", style="red", markup=False, highlight=False)
    console.print("it stays up" if figures["ok"] else "it does not stay up", style="bold")
    sys.exit(0 if figures["ok"] else 1)


def _own_server(config: Config, full_stores: bool) -> Config:
    """``config`` on ports of its own, with texts kept in small stores unless they are to be full."""
    server = config.server.model_copy(update={"host": "127.0.0.1", "grpc_port": 0, "http_port": 0})
    engine = config.engine
    if not full_stores:
        engine = engine.model_copy(update={"speculation": engine.speculation.model_copy(update=_SMALL_STORES)})
    return config.model_copy(update={"server": server, "engine": engine})
