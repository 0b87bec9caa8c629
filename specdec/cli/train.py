"""`specdec train-head`: a drafter for one's own target."""

from __future__ import annotations

from pathlib import Path

import click

from specdec.cli.models import CACHE_DIR
from specdec.config import EngineConfig

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("train-head")
@click.option("--target", default=EngineConfig.model_fields["target"].default, show_default=True,
              help="The model that the head will draft for.")  # fmt: skip
@click.option("--out", "-o", required=True, type=_FOLDER, help="The head's folder; a run that was ended goes on there.")
@click.option("--data", type=_FOLDER, help="Folder of the collected texts, for several trainings. Default: OUT/texts.")
@click.option("--texts", "given", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH",
              help="File or folder of .txt, .md, .rst, .py, .jsonl to answer; may be repeated.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=1), default=3_000_000, show_default=True,
              help="Tokens of text to collect.")  # fmt: skip
@click.option("--passes", type=click.IntRange(min=0), default=4, show_default=True,
              help="Times that the training reads the texts; 0: only collect them.")  # fmt: skip
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="End after this time; run again to go on.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Compute threads; 0: one per core.")
@CACHE_DIR
def train_head_command(
    target: str,
    out: Path,
    data: Path | None,
    given: tuple[Path, ...],
    tokens: int,
    passes: int,
    hours: float | None,
    threads: int,
    cache_dir: Path,
) -> None:
    """Train an EAGLE-3 head for a target, on texts that the target writes itself.

    \b
    specdec train-head --target smollm2-135m --out head --texts ~/docs --hours 8
    specdec serve --target smollm2-135m --draft-head head
    """
    from specdec.cli.progress_bar import LiveLine, ProgressBar
    from specdec.training.session import TrainingPlan, train_head

    plan = TrainingPlan(target, out, data or out / "texts", given, tokens, hours, passes, threads, cache_dir)
    with ProgressBar() as progress, LiveLine(plain_every_s=30) as line:
        train_head(plan, line.note, line.show, progress)
