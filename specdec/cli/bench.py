"""`specdec bench`: benchmarks of a model (`step`, `perplexity`), an engine, its drafts, and other engines."""

from __future__ import annotations

import asyncio
import json
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from bench.engine_runs import FIXED_GRID
from bench.peers import ENGINES, PEER_WORKLOADS
from bench.workloads import FETCHED_NAMES, SINGLE_NAMES, WORKLOAD_NAMES
from specdec.cli.bench_output import (
    choices_option,
    count_option,
    json_file_option,
    json_option,
    number_option,
    print_figures,
    print_table,
    progress_line,
    repeated_option,
    reported,
)
from specdec.cli.bench_serve import serve_load_command
from specdec.cli.bench_server import edits_command, frontend_command, typing_command
from specdec.cli.models import CACHE_DIR
from specdec.cli.options import config_options, engine_options, pop_config
from specdec.config import EngineConfig
from specdec.control_groups import usable_cores

if TYPE_CHECKING:
    from bench.peers.peer import PeersPlan
    from bench.peers.peers_report import PeersRun


_DRAFTS_FIELDS = ("target", "draft_dtype", "dtype", "kv_dtype", "device", "threads", "kv_tokens", "cache_dir")
_DRAFTS_OPTIONS = tuple((f"--{name.replace('_', '-')}", f"engine.{name}") for name in _DRAFTS_FIELDS)


@click.command("drafts")
@partial(config_options, options=_DRAFTS_OPTIONS)
@repeated_option("--head", "heads", metavar="FOLDER", help="An EAGLE-3 head; may be repeated.")
@repeated_option("--draft", "drafts", metavar="MODEL", help="A draft model; may be repeated.")
@choices_option("--workload", "names", of=SINGLE_NAMES + FETCHED_NAMES, default=("mixed",), help="May be repeated.")
@click.option(
    "--prompts-file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your own prompts instead: JSON lines as for `specdec replay`, with `prompt` or `messages`, and `max_tokens`.",
)  # fmt: skip
@count_option("--prompts", default=8, help="Per workload, or of the file; one more is a warm-up.")
@click.option("--max-tokens", type=click.IntRange(min=8), help="Length limit of an answer; default: each prompt's own.")
@json_file_option("Write every figure to this file.")
def drafts_command(
    heads: tuple[str, ...], drafts: tuple[str, ...], names: tuple[str, ...], file: Path | None, prompts: int,
    max_tokens: int | None, json_file: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Compare draft models and feature heads of one target.

    All run the same prompts; the result says which one to keep. Each runs beside the drafters that need no model, as it
    would be served; "no candidate" is these alone. The machine needs memory for the target and all candidates together.
    """
    from bench.drafts_bench import compare, file_prompts, load_candidates
    from bench.workloads.make import make_workload
    from specdec.cli.progress_bar import progress_bars

    config, say = pop_config({"drafter": (), "index": (), "config_file": None} | values).engine, progress_line()
    with progress_bars() as progress:
        base, candidates = load_candidates(config, heads, drafts, progress)
    if file is not None:
        workloads = [file_prompts(file, base.tokenizer, prompts, max_tokens)]
    else:
        workloads = [make_workload(name, base.tokenizer, prompts, max_tokens, say) for name in names]
    report = compare(base, candidates, workloads, say)
    figures = report.as_dict()
    rows = []
    for arm, row in figures["arms"].items():
        numbers = [row["ms_per_token"], row["ratio"], row["tokens_per_step"], row.get("level_ms")]
        shares = " ".join("-" if share is None else f"{share:.0%}" for share in row.get("acceptance", ()))
        rows.append([arm, *("-" if number is None else f"{number:.2f}" for number in numbers), shares])
    heads_of = ("candidate", "ms/token", "ratio", "tokens/step", "level ms", "accepted at 1, 2, ...")
    with reported(figures, json_file, report.stopped):
        print_table(heads_of, rows, "speculation auto; ratio: off's time over its own")
        click.echo(f"keep {figures['keep']}: {figures['reason']}")


ARM_TOKENS = 20480  # of KV cache per arm: all arms run at the same time


@click.command("engine")
@engine_options
@choices_option(
    "--workload", "workloads", of=WORKLOAD_NAMES + FETCHED_NAMES, help="May be repeated; default: all but next_edit."
)
@count_option("--prompts", default=8, help="Per workload; `concurrent/...` has at least 3 x --at-once.")
@click.option(
    "--at-once", type=click.IntRange(2, 64), default=8, show_default=True, help="Requests at once of `concurrent/...`."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=8), help="Length limit of an answer; default: each workload's own."
)
@number_option("--temperature", default=0.0, help="0: greedy.")
@click.option("--fixed", is_flag=True, help="Also run a grid of fixed settings; takes about four times as long.")
@choices_option(
    "--setting", "settings", of=[arm.name for arm in FIXED_GRID],
    help="Also run this fixed setting, depth x width / nodes; may be repeated.",
)  # fmt: skip
@click.option("--off-cost", is_flag=True, help="Also measure the cost of speculation that is off.")
@json_file_option("Write every figure to this file.")
def engine_command(
    engine_config: EngineConfig, workloads: tuple[str, ...], at_once: int, fixed: bool, settings: tuple[str, ...],
    json_file: Path | None, **asked: Any,
) -> None:  # fmt: skip
    """Compare the time per token with speculation off and auto. Same requests, same weights, step by step in turns."""
    from bench.engine_session import EngineBenchPlan, report_tables, run_session
    from specdec.cli.progress_bar import load_parts

    places = max(engine_config.max_batch, at_once)
    arms = tuple(arm for arm in FIXED_GRID if fixed or arm.name in settings)
    kv_tokens = max(engine_config.kv_tokens, ARM_TOKENS * (2 + len(arms)))
    sizes = {"max_batch": places, "kv_tokens": kv_tokens}
    if places > engine_config.max_step_rows:  # set only then: a GPU has a default of its own
        sizes["max_step_rows"] = places
    parts = load_parts(engine_config.model_copy(update=sizes))
    plan = EngineBenchPlan(workloads or WORKLOAD_NAMES, fixed=arms, at_once=at_once, **asked)
    report = run_session(parts, plan, progress_line())
    facts = ("cpu", "cores", "read_bandwidth_gb_s", "target", "draft", "date", "commit")
    with reported(report.as_dict(), json_file, report.stopped):
        for table in report_tables(report):
            print_table(*table)
        for line in report.skipped:
            click.echo(f"skipped {line}")
        print_figures({**report.machine, "seconds": f"{report.seconds:.0f}"}, (*facts, "seconds"), 20)


@click.command("peers")
@click.option("--target", default=EngineConfig.model_fields["target"].default, show_default=True,
              help="A .gguf file or a catalogue name.")  # fmt: skip
@click.option("--draft", help="Draft model, for specdec and llama.cpp.")
@choices_option("--engine", "engines", of=ENGINES, help="May be repeated; default: all of them.")
@choices_option("--workload", "workloads", of=PEER_WORKLOADS, help="May be repeated; default: all of them.")
@count_option("--prompts", default=4, help="Per workload.")
@count_option("--max-tokens", default=64, least=2, help="Length of an answer.")
@count_option("--threads", default=0, least=0, help="Per engine; 0: all cores.")
@CACHE_DIR
@json_file_option("Write every figure and answer to this file.")
def peers_command(
    engines: tuple[str, ...], workloads: tuple[str, ...], threads: int, json_file: Path | None, **asked: Any
) -> None:
    """Compare the time per token of specdec and other engines.

    Same prompts, model and threads, in turns. Prints tables in Markdown. `make peers` installs the other engines.
    """
    from bench.peers.peer import PeersPlan

    plan = PeersPlan(
        threads=threads or usable_cores(), workloads=workloads or PEER_WORKLOADS, engines=engines or ENGINES, **asked
    )
    try:
        run = asyncio.run(_run(plan))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    with reported(run.as_dict(), json_file, run.stopped):
        click.echo(run.markdown())


async def _run(plan: PeersPlan) -> PeersRun:
    from rich.console import Console

    from bench.peers.peers_session import run_peers
    from specdec.cli.progress_bar import progress_bars

    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in one
    # By default Python would exit at once and leave the engines running.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(stderr=True)  # one for lines and bars, so that lines do not break the bars
    with progress_bars(console) as progress:
        return await run_peers(plan, progress_line(console), progress)


@click.command("step")
@engine_options
@count_option("--repeats", default=15, help="Repeats, shapes in turns; medians are reported.")
@repeated_option(
    "--context", "contexts", type=click.IntRange(min=1), default=(256, 2048),
    help="Tokens before the rows; may be repeated.",
)  # fmt: skip
@json_option
def step_command(engine_config: EngineConfig, repeats: int, contexts: tuple[int, ...], as_json: bool) -> None:
    """Measure a forward by rows and context, and prefill. Also the other parts of an engine step."""
    from bench.forward import StepBench
    from specdec.cli.progress_bar import load_parts

    parts = load_parts(engine_config)
    figures = StepBench(parts).run(repeats, contexts)
    figures |= {name: getattr(parts.info, name) for name in ("target", "dtype", "kv_dtype", "threads")}
    step_ms = figures["step_ms"]
    for context in contexts:
        if str(context) not in step_ms:
            click.echo(f"left out --context {context}: too long for the model's {parts.info.max_context}", err=True)
    if as_json:
        click.echo(json.dumps(figures))
        return
    rows = ([context, *(f"{ms:.2f}" for ms in row.values())] for context, row in step_ms.items())
    print_table(["context", *next(iter(step_ms.values()))], rows, "ms per forward, by rows")
    print_figures(figures, (name for name in figures if name not in ("step_ms", "definitions")))
    for name, definition in figures["definitions"].items():
        click.echo(f"{name} = {definition}")


@click.command("perplexity")
@engine_options
@count_option("--tokens", default=4096, help="Tokens of real text to score.")
@count_option("--window", default=512, least=2, help="Tokens of a window.")
@count_option("--given", default=1, help="Tokens at the start of a window that are not scored.")
@click.option("--text", type=click.File(encoding="utf-8"), help="Text to score; default: code of Python's library.")
@click.option(
    "--of", type=click.Choice(["weights", "kv"]), default="weights", show_default=True, help="What the types are of."
)
@json_option
def perplexity_command(
    engine_config: EngineConfig, tokens: int, window: int, given: int, text: TextIO | None, of: str, as_json: bool
) -> None:
    """Compute the perplexity with each numeric type.

    Types of the weights, or of the KV cache; each also as a ratio to fp32. To score like llama-perplexity: --window 512
    --given 257 --text FILE.
    """
    if given > window:
        raise click.BadParameter("must not exceed --window", param_hint="--given")
    from bench.forward import perplexity
    from specdec.cli.progress_bar import load_parts

    found: dict[str, float] = {}
    try:
        content = text.read() if text else None
    except UnicodeDecodeError:
        raise click.BadParameter("is not UTF-8 text", param_hint="--text") from None
    dtypes = ("fp32", "bf16", "int8", *(("auto",) if of == "weights" else ()))
    setting = "dtype" if of == "weights" else "kv_dtype"
    for dtype in dtypes:
        parts = load_parts(engine_config.model_copy(update={setting: dtype}))
        found[dtype], scored = perplexity(parts, tokens, window, content, given)
        del parts  # before the next model is loaded
    figures = {"scored_tokens": scored} | {f"{dtype}_perplexity": round(value, 4) for dtype, value in found.items()}
    figures |= {f"{dtype}_over_fp32": round(found[dtype] / found["fp32"], 5) for dtype in dtypes[1:]}
    if as_json:
        asked = {"tokens": tokens, "window": window, "given": given, "of": of}
        click.echo(json.dumps({"target": engine_config.target, **asked, **figures}))
        return
    print_figures(figures, figures, 18)


@click.group("bench")
def bench_group() -> None:
    """Measure engines, servers and drafters."""


for _command in (
    step_command, perplexity_command, engine_command, drafts_command, serve_load_command, peers_command,
    frontend_command, typing_command, edits_command,
):  # fmt: skip
    bench_group.add_command(_command)
