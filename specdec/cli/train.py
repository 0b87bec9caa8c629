"""`specdec train-head`: a drafter for one's own target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specdec.cli.bench_output import count_option
from specdec.cli.models import CACHE_DIR
from specdec.cli.options import POSITIVE
from specdec.config import EngineConfig

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("train-head")
@click.option("--kind", type=click.Choice(["head", "model", "index"]), default="head", show_default=True,
              help="A new EAGLE-3 head, a small model that exists, or an index of the texts.")  # fmt: skip
@click.option("--draft", help="The small model, for --kind model; of the target's vocabulary.")
@click.option("--rank", type=click.IntRange(0, 1024), default=16, show_default=True,
              help="For --kind model: of the matrices added to its own (LoRA); 0: train all weights.")  # fmt: skip
@click.option("--target", default=EngineConfig.model_fields["target"].default, show_default=True,
              help="The model that is drafted for.")  # fmt: skip
@click.option(
    "--out", "-o", required=True, type=_FOLDER, help="The drafter's folder; a run that was ended goes on there."
)
@click.option("--data", type=_FOLDER, help="Folder of the collected texts, for several trainings. Default: OUT/texts.")
@click.option("--texts", "given", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH",
              help="File or folder of .txt, .md, .rst, .py, .jsonl to answer; may be repeated.")  # fmt: skip
@count_option("--tokens", default=3_000_000, help="Tokens of text to collect.")
@count_option("--passes", default=4, least=0, help="Times that the training reads the texts; 0: only collect them.")
@click.option("--hours", type=POSITIVE, help="End after this time; run again to go on.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Compute threads; 0: one per core.")
@CACHE_DIR
def train_head_command(kind: str, out: Path, data: Path | None, draft: str | None, **values: Any) -> None:
    """Make a drafter for a target from texts that the target writes itself: train an EAGLE-3 head or a draft model, or
    index the texts.

    \b
    specdec train-head --target smollm2-135m --out head --texts ~/docs --hours 8
    specdec serve --target smollm2-135m --draft-head head
    \b
    specdec train-head --kind model --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --out draft --texts ~/src
    specdec serve --target qwen2.5-coder-1.5b --draft draft
    \b
    specdec train-head --kind index --target smollm2-135m --out answers --tokens 1000000
    specdec serve --target smollm2-135m --index own=answers/answers.index
    """
    from specdec.cli.progress_bar import LiveLine, progress_bars
    from specdec.training.session import TrainingPlan, train_drafter

    if (kind == "model") != (draft is not None):
        raise click.UsageError("--draft: --kind model needs the small model to train, and the other kinds take none")
    if kind != "model" and click.get_current_context().get_parameter_source("rank") == ParameterSource.COMMANDLINE:
        raise click.UsageError("--rank: only --kind model has one; leave it out")
    plan = TrainingPlan(out=out, data=data or out / "texts", draft=draft, index=kind == "index", **values)
    with progress_bars() as progress, LiveLine(plain_every_s=30) as line:
        train_drafter(plan, line.note, line.show, progress)
