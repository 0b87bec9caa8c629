"""Options and output of the `specdec bench` commands: progress lines, then one JSON object or tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import FiniteRange, check_folder

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def count_option(*names: str, default: int, help: str, least: int = 1) -> Decorator:
    """An option that takes a whole number from ``least``."""
    return click.option(*names, type=click.IntRange(min=least), default=default, show_default=True, help=help)


def number_option(*names: str, default: float, help: str, least: float = 0) -> Decorator:
    """An option that takes a number from ``least``."""
    return click.option(*names, type=FiniteRange(least, 10**9), default=default, show_default=True, help=help)


def repeated_option(*names: str, default: Sequence[Any] = (), **rest: Any) -> Decorator:
    """An option that may be repeated. What it names twice counts once."""
    return click.option(
        *names, multiple=True, default=default or None, show_default=bool(default),
        callback=lambda context, option, values: tuple(dict.fromkeys(values)), **rest,
    )  # fmt: skip


def choices_option(*names: str, of: Sequence[str], help: str, default: Sequence[str] = ()) -> Decorator:
    """A `repeated_option` whose values are some of ``of``."""
    return repeated_option(*names, default=default, type=click.Choice(of), help=help)


def progress_line(console: Console | None = None) -> Callable[[str], None]:
    """Prints each message, dimmed, to ``console``, by default standard error."""
    from rich.console import Console

    console = console or Console(stderr=True)
    return lambda line: console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)


def json_file_option(help: str) -> Decorator:
    """``--json``, the file to write a result to, as ``json_file``; the file's folder must exist."""

    def check(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
        check_folder("--json", path)
        return path

    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--json", "json_file", type=kind, callback=check, help=help)


@contextmanager
def reported(figures: Mapping[str, Any], path: Path | None, stopped: bool) -> Iterator[None]:
    """Writes ``figures`` to the file of `json_file_option`, if one was given, before the block that prints the report.

    Raises, after the block, so that what was measured is shown:
        click.ClickException: the file cannot be written.
        KeyboardInterrupt: the measurement was ``stopped`` by Ctrl-C.
    """
    failed: OSError | None = None
    try:
        if path is not None:
            path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        failed = error
    yield
    if failed is not None:
        raise click.ClickException(f"--json: {path} cannot be written ({failed.strerror}); the figures are above")
    if stopped:
        raise KeyboardInterrupt("the report has what was measured until then")


_FILE_WIDTH = 1000  # characters of a line in a file or a pipe


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", caption: str = "") -> None:
    """On the terminal's width; elsewhere as wide as the table is. What does not fit in a column is folded, not cut.

    Texts are printed verbatim: errors of servers and file names may look like rich's markup.
    """
    from rich.table import Table

    table = Table(title=title or None, caption=caption or None)
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*row)
    table_console().print(table)


def table_console() -> Console:
    """As wide as the terminal; elsewhere wide enough for any table."""
    from rich.console import Console

    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def print_figures(figures: Mapping[str, Any], names: Iterable[str], width: int = 24) -> None:
    """A line for each of ``names``."""
    for name in names:
        click.echo(f"{name:{width}} {figures[name]}")
