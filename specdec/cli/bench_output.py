"""Options and output of the `specdec bench` commands: progress lines, then one JSON object or tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import FiniteRange

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


def print_json(figures: Mapping[str, Any]) -> None:
    """On one line."""
    click.echo(json.dumps(figures))


def plain_console() -> Console:
    """A console that prints text verbatim: errors of servers and file names may look like rich's markup."""
    from rich.console import Console

    return Console(markup=False, emoji=False)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """On the terminal's width."""
    from rich.table import Table

    table = Table(*heads, title=title or None)
    for row in rows:
        table.add_row(*row)
    plain_console().print(table)


def print_figures(figures: Mapping[str, Any], names: Iterable[str], width: int = 24) -> None:
    """A line for each of ``names``."""
    for name in names:
        click.echo(f"{name:{width}} {figures[name]}")
