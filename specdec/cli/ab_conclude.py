"""What an experiment came to: files, words and an exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from server.experiment.analysis.result import Result

RESULT, REPORT = "result.json", "report.html"


def conclusion_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``demand`` and ``as_json``, which `conclude` takes."""
    demand = click.option(
        "--demand",
        type=click.Choice(["not-worse", "better", "none"]),
        default="not-worse",
        show_default=True,
        help="Verdict for which the exit code is 0; not-worse: better or equivalent; none: anything valid.",
    )
    return demand(click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command))


def conclude(folder: Path, demand: str, as_json: bool) -> int:
    """Analyse the records in ``folder``, write `RESULT` and `REPORT` beside them, say the verdict; the exit code.

    Raises:
        ExperimentError: there is nothing to analyse.
    """
    from server.experiment.analysis.analyse import analyse
    from server.experiment.analysis.exit_code import exit_code
    from server.experiment.manifest import Manifest
    from server.experiment.record_log import read_records
    from server.experiment.report.render import render

    result = analyse(Manifest.read(folder), read_records(folder))
    write_text(folder / RESULT, result.model_dump_json(indent=1) + "\n")
    write_text(folder / REPORT, render(result))
    if as_json:
        click.echo(result.model_dump_json())
    else:
        _show(result)
        click.echo(f"report: {folder / REPORT}")
    return exit_code(result.verdict.kind, demand)  # type: ignore[arg-type]  # click has checked it


def write_text(path: Path, text: str) -> None:
    """Raises click.ClickException: it can not be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path}: can not be written ({error.strerror})") from None


def _show(result: Result) -> None:
    click.echo(result.verdict.headline)
    for line in (*result.verdict.reasons, *(f"Note: {note}." for note in result.notes)):
        click.echo(f"  {line}")
