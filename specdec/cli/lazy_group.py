"""A click group that imports a subcommand only when it is invoked."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from specdec.errors import SpecdecError


class LazyCommand(NamedTuple):
    """Where a subcommand lives (module:attribute), and its line in the help."""

    place: str
    help: str


class LazyGroup(click.Group):
    """`specdec --help` is instant, because nothing heavy is imported for it. A `SpecdecError` ends any subcommand with
    one line on standard error and exit code 1."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self._lazy.get(cmd_name)
        if found is None:
            return None
        module, _, attribute = found.place.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise click.ClickException(" ".join(str(error).split())) from error
