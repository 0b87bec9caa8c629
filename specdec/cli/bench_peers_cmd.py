"""`specdec bench peers`: other engines and ours, side by side on the same prompts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bench.peers import ENGINES, PEER_WORKLOADS
from specdec.config import EngineConfig

if TYPE_CHECKING:
    from bench.peers.peers_plan import PeersPlan
    from bench.peers.peers_run import PeersRun

_DEFAULT = EngineConfig()
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("peers")
@click.option("--target", default=_DEFAULT.target, show_default=True, help="A .gguf file or a catalogue name.")
@click.option("--draft", help="Small model for those who can draft with it; of another vocabulary too.")
@click.option(
    "--engine", "engines", type=click.Choice(ENGINES), multiple=True, help="May be repeated; default: all of them."
)
@click.option(
    "--workload", "workloads", type=click.Choice(PEER_WORKLOADS), multiple=True,
    help="May be repeated; default: all of them.",
)  # fmt: skip
@click.option("--prompts", type=click.IntRange(min=1), default=4, show_default=True, help="Per workload.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Longest answer.")
@click.option(
    "--natural-ends", is_flag=True, help="Answers end where the model ends them; default: only those of fim do."
)
@click.option("--threads", type=click.IntRange(min=0), default=0, show_default=True, help="Of each; 0: all cores.")
@click.option(
    "--alive", type=click.Choice(["all", "one"]), default="all", show_default=True,
    help="all: every engine stays in memory, idle ones stopped, and they take turns at every prompt. "
    "one: the others are ended, and they take turns at halves of the work.",
)  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=1), default=180.0, show_default=True, help="Seconds per answer.")
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    default=_DEFAULT.cache_dir,
    help="Where `make peers` installed them.",
)
@click.option("--json", "json_file", type=_FILE, help="Write every figure and every answer there.")
def peers_command(
    target: str, draft: str | None, engines: tuple[str, ...], workloads: tuple[str, ...], prompts: int,
    max_tokens: int, natural_ends: bool, threads: int, alive: str, timeout: float, cache_dir: Path,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Time per token of ours and of other engines: same prompts, same model, same threads, in turns.

    Prints tables in Markdown. `make peers` installs the others.
    """
    from bench.peers.peers_plan import PeersPlan
    from bench.peers.peers_report import PeersReport

    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json: {json_file.parent} is not a folder")
    plan = PeersPlan(
        target=target, draft=draft, cache_dir=cache_dir.expanduser(), threads=threads or len(os.sched_getaffinity(0)),
        workloads=workloads or PEER_WORKLOADS, engines=engines or ENGINES, prompts=prompts, max_tokens=max_tokens,
        natural_ends=natural_ends, keep=alive == "all", answer_s=timeout,
    )  # fmt: skip
    try:
        report = PeersReport(asyncio.run(_run(plan)))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
    click.echo(report.markdown())


async def _run(plan: PeersPlan) -> PeersRun:
    from rich.console import Console

    from bench.peers.peers_session import run_peers
    from specdec.models.progress_bar import ProgressBar

    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in one
    # Python would end at once, and leave the engines behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    with ProgressBar(console) as progress:
        return await run_peers(plan, say, progress)
