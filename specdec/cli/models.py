"""`specdec models`: what can be had by name, and getting it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from specdec.cli.bench_output import table_console
from specdec.config import EngineConfig

CACHE_DIR = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=EngineConfig.model_fields["cache_dir"].default,
    show_default=True,
    callback=lambda _, __, path: Path(os.path.expanduser(path)),  # `Path.expanduser` refuses users who do not exist
    help="Where models are kept.",
)


@click.group("models")
def models_group() -> None:
    """List and fetch the models that are known by name."""


@models_group.command("list")
@CACHE_DIR
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def list_command(cache_dir: Path, as_json: bool) -> None:
    """Show the catalogue, and which models are already here."""
    from rich.table import Table

    from specdec.models.catalogue import CATALOGUE, DEFAULT_MODEL
    from specdec.models.fetch import Fetcher

    fetcher = Fetcher(cache_dir / "models")
    if as_json:
        rows = [
            {
                "name": entry.name,
                "title": entry.title,
                "licence": entry.licence,
                "licence_in_file": entry.licence_in_file,
                "drafts": entry.drafts,
                "bytes": entry.size,
                "default": entry.name == DEFAULT_MODEL,
                "path": str(fetcher.path(entry)) if fetcher.is_complete(entry) else None,
            }
            for entry in CATALOGUE.values()
        ]
        click.echo(json.dumps(rows))
        return
    table = Table("name", "model", "licence", "drafts for it", "size", "here", padding=(0, 0))
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", column.header in ("name", "drafts for it")
    for entry in CATALOGUE.values():
        name = f"{entry.name}\n(default)" if entry.name == DEFAULT_MODEL else entry.name
        here = "yes" if fetcher.is_complete(entry) else "no"
        licence = entry.licence if entry.licence_in_file else f"{entry.licence} *"
        table.add_row(name, entry.title, licence, "\n".join(entry.drafts), f"{entry.size / 1e6:.0f} MB", here)
    table_console().print(table)
    click.echo("* as its publisher states it; the file itself does not say")


@models_group.command("fetch")
@click.argument("name")
@CACHE_DIR
def fetch_command(name: str, cache_dir: Path) -> None:
    """Fetch the catalogue model NAME. An interrupted fetch resumes."""
    from specdec.cli.progress_bar import progress_bars
    from specdec.models.catalogue import find_entry
    from specdec.models.fetch import Fetcher

    with progress_bars() as progress:
        path = Fetcher(cache_dir / "models").fetch(find_entry(name), progress)
    click.echo(path)
