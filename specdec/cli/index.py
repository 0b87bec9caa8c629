"""`specdec index`: files of one's own, to draft from."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

from specdec.cli.models import CACHE_DIR
from specdec.config import EngineConfig


@click.command("index")
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(exists=True, path_type=Path))
@click.option("--out", "-o", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The index's file.")
@click.option("--target", default=EngineConfig.model_fields["target"].default, show_default=True,
              help="The model that will be served: the index is in its tokens.")  # fmt: skip
@click.option("--only", multiple=True, metavar="PATTERN",
              help="Index only what fits this, as .gitignore writes patterns; may be repeated.")  # fmt: skip
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out what fits this; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@CACHE_DIR
def index_command(
    paths: tuple[Path, ...],
    out: Path,
    target: str,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
    cache_dir: Path,
) -> None:
    """Index the text files at PATHs, so that a server can draft from them.

    What .gitignore files hide stays out, and so do links, files over 1 MiB, those that are not UTF-8 text, and private
    keys. Where the index is there already, only files that changed are read again; without any PATH it is brought up to
    date with the PATHs it was made of that are still there. A running server takes the new one with the next request.

    \b
    specdec index ~/src/project --out project.index --target qwen2.5-coder-1.5b
    specdec serve --target qwen2.5-coder-1.5b --index project=project.index
    """
    from draft.index_build import IndexSources, build_index
    from draft.token_index import TokenIndex
    from specdec.cli.progress_bar import progress_bars
    from specdec.models.resolve import load_tokenizer

    began = time.perf_counter()
    out = Path(os.path.realpath(out))  # a link is kept, and its target replaced
    former = TokenIndex(out) if out.exists() else None
    if paths:
        sources = IndexSources(tuple(os.path.realpath(path) for path in paths), only, exclude)
    elif former is None or not former.header.roots:
        raise click.UsageError(f"PATH: nothing to index, and {out} is no index of files to bring up to date")
    elif only or exclude:
        raise click.UsageError("--only and --exclude need PATHs; without, an index stays made of what it was")
    else:
        sources = IndexSources(former.header.roots, former.header.only, former.header.exclude)
    with progress_bars() as progress:
        tokenizer = load_tokenizer(target, cache_dir, progress)
        if former is not None and not paths and former.header.fingerprint != tokenizer.fingerprint:
            raise click.UsageError(f"--target: {out} has the tokens of another model; name the one it was made for")
        report = build_index(out, sources, tokenizer, former, progress)
    seconds = time.perf_counter() - began
    if as_json:
        found = {"files": report.files, "read": report.read, "tokens": report.tokens, "bytes": report.size}
        click.echo(json.dumps({**found, "written": report.written, "seconds": round(seconds, 2)}))
    else:
        done = (
            f"{report.read} of {report.files} files read" if report.written else f"{report.files} files, none changed"
        )
        click.echo(f"{out}: {done}, {report.tokens} tokens, {report.size / 1e6:.1f} MB, {seconds:.1f} s")
