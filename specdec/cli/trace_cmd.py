"""`specdec trace`: why the engine drafted as it did."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from specdec.config import ServerConfig
from specdec.types import StepTrace

_LIMIT = click.option(
    "--limit",
    type=click.IntRange(1, 2**32 - 1),
    default=50,
    show_default=True,
    help="Show so many steps at most, the last.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one step each.")
_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_PIPE_WIDTH = 160


@click.group("trace", invoke_without_command=True)
@click.option(
    "--server",
    default=f"127.0.0.1:{ServerConfig.model_fields['grpc_port'].default}",
    show_default=True,
    help="HOST:PORT of a running server.",
)
@_LIMIT
@_JSON
@click.pass_context
def trace_group(ctx: click.Context, server: str, limit: int, as_json: bool) -> None:
    """Show the last steps of a server: what was drafted, and predicted against realised tokens and milliseconds."""
    if ctx.invoked_subcommand is not None:
        for name in ctx.params:
            if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE:
                raise click.UsageError(f"give the options of `{ctx.invoked_subcommand}` after it")
        return
    from specdec.cli.remote_runner import RemoteRunner

    with RemoteRunner(server) as remote:
        _show(remote.trace(limit), limit, as_json)


@trace_group.command("show")
@_FILE
@_LIMIT
@_JSON
def show_command(file: Path, limit: int, as_json: bool) -> None:
    """Show the last steps of the trace file FILE, and a summary of all."""
    from specdec.control.trace_file import read_trace

    _, steps = read_trace(file)
    _show(steps, limit, as_json)


@trace_group.command("replay")
@_FILE
def replay_command(file: Path) -> None:
    """Let the controller decide every step of the trace file FILE again; exit code 1 when it decides otherwise."""
    from specdec.control.replay import replay_file

    report = replay_file(file)
    if report.steps == 0:
        raise click.ClickException(f"{file}: holds no step that can be decided again")
    click.echo(f"{report.steps} steps decided again, {len(report.differences)} differences")
    for difference in report.differences[:1]:
        click.echo(f"first difference: {difference}")
    sys.exit(1 if report.differences else 0)


def _show(steps: Iterable[StepTrace], limit: int, as_json: bool) -> None:
    from specdec.cli.trace_summary import TraceSummary
    from specdec.types.as_json import trace_dict

    summary = TraceSummary()
    last: deque[StepTrace] = deque(maxlen=limit)
    for step in steps:
        summary.add(step)
        last.append(step)
    if as_json:
        for step in last:
            click.echo(json.dumps(trace_dict(step), separators=(",", ":")))
        return
    if not last:
        click.echo("no step has been traced yet")
        return
    from rich.console import Console

    from specdec.cli.trace_view import show_trace

    # Piped text is read whole or searched: rows must not be folded to a terminal's width.
    width: dict[str, Any] = {} if sys.stdout.isatty() else {"width": _PIPE_WIDTH}
    show_trace(last, summary, Console(**width))
