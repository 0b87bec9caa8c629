"""`specdec bench drafts`: which of several feature heads and draft models to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bench.workloads import FETCHED_NAMES, WORKLOAD_NAMES
from specdec.cli.bench_output import count_option, print_table, progress_line
from specdec.cli.options import Command, check_folder, config_options, pop_config

_FIELDS = ("target", "draft_dtype", "dtype", "kv_dtype", "device", "threads", "kv_tokens", "cache_dir")
_FILE = click.Path(dir_okay=False, path_type=Path)


def _engine_fields(command: Command) -> Command:
    return config_options(command, tuple((f"--{name.replace('_', '-')}", f"engine.{name}") for name in _FIELDS))


@click.command("drafts")
@_engine_fields
@click.option("--head", "heads", multiple=True, metavar="FOLDER", help="An EAGLE-3 head; may be repeated.")
@click.option("--draft", "drafts", multiple=True, metavar="MODEL", help="A draft model; may be repeated.")
@click.option(
    "--workload", "names", type=click.Choice([n for n in WORKLOAD_NAMES + FETCHED_NAMES if n != "concurrent"]),
    multiple=True, default=("mixed",), show_default=True, help="May be repeated.",
)  # fmt: skip
@click.option(
    "--prompts-file", "file", type=_FILE,
    help="Your own prompts instead: JSON lines with `prompt`, or `messages` of `role` and `content`; and `max_tokens`.",
)  # fmt: skip
@count_option("--prompts", default=8, help="Per workload, or of the file; one more is a warm-up.")
@click.option("--max-tokens", type=click.IntRange(min=8), help="Length limit of an answer; default: each prompt's own.")
@click.option("--json", "path", type=_FILE, help="Write every figure to this file.")
def drafts_command(
    heads: tuple[str, ...], drafts: tuple[str, ...], names: tuple[str, ...], file: Path | None, prompts: int,
    max_tokens: int | None, path: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Compare feature heads and draft models for one target on the same prompts, and say which one to keep.

    Each runs beside the drafters that need no model, as it would be served; "no candidate" is these alone. All are in
    memory at once, the target only once: the machine needs room for the target and the sum of the candidates.
    """
    from bench.drafts_bench import compare, file_prompts, load_candidates
    from bench.workloads.make import make_workload
    from specdec.cli.progress_bar import ProgressBar

    check_folder("--json", path)
    config, say = pop_config({"drafter": (), "index": (), "config_file": None} | values).engine, progress_line()
    with ProgressBar() as progress:
        base, candidates = load_candidates(config, heads, drafts, progress)
    if file is not None:
        workloads = [file_prompts(file, base.tokenizer, prompts, max_tokens)]
    else:
        workloads = [w for name in names for w in make_workload(name, base.tokenizer, prompts, max_tokens, say)]
    report = compare(base, candidates, workloads, say)
    figures = report.as_dict()
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    rows = []
    for arm, row in figures["arms"].items():
        numbers = [row["ms_per_token"], row["ratio"], row["tokens_per_step"], row.get("level_ms")]
        shares = " ".join("-" if share is None else f"{share:.0%}" for share in row.get("acceptance", ()))
        rows.append([arm, *("-" if number is None else f"{number:.2f}" for number in numbers), shares])
    heads_of = ("candidate", "ms/token", "ratio", "tokens/step", "level ms", "accepted at 1, 2, ...")
    print_table(heads_of, rows, "speculation auto; ratio: off's time over its own")
    click.echo(f"keep {figures['keep']}: {figures['reason']}")
