"""`specdec trace`: why the engine drafted as it did, as a table and a summary."""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from specdec.cli.bench_output import table_console
from specdec.cli.options import CONNECT_S, Ask, WholeNumber, asks_server
from specdec.core.types import DrafterStats, DrafterTrace, StepTrace

_LIMIT = click.option(
    "--limit", type=WholeNumber(1, 2**32 - 1), default=50, show_default=True, help="The last steps, at most so many."
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON lines, one step each.")
_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))


@click.group("trace", invoke_without_command=True)
@asks_server
@_LIMIT
@_JSON
@click.pass_context
def trace_group(ctx: click.Context, ask: Ask, model: str, limit: int, as_json: bool) -> None:
    """Show the last steps of a server: what was drafted, and predicted against realised tokens and milliseconds."""
    if ctx.invoked_subcommand is not None:
        if any(ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE for name in ctx.params):
            raise click.UsageError(f"give the options of `{ctx.invoked_subcommand}` after it")
        return
    _show(ask(lambda client: client.trace(limit, CONNECT_S, model=model)), limit, as_json)


@trace_group.command("show")
@_FILE
@_LIMIT
@_JSON
def show_command(file: Path, limit: int, as_json: bool) -> None:
    """Show the last steps of the trace file FILE, and a summary of all."""
    from specdec.control.trace import read_trace

    _, steps = read_trace(file)
    _show(steps, limit, as_json)


@trace_group.command("replay")
@_FILE
def replay_command(file: Path) -> None:
    """Decide every step of the trace file FILE again. Exit code 1: a decision differs."""
    from specdec.control.trace import replay_file

    report = replay_file(file)
    click.echo(f"{report.steps} steps decided again, {len(report.differences)} differences")
    for difference in report.differences[:1]:
        click.echo(f"first difference: {difference}")
    sys.exit(1 if report.differences else 0)


def _show(steps: Iterable[StepTrace], limit: int, as_json: bool) -> None:
    from specdec.core.types import trace_dict

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
    show_trace(last, summary, table_console())


@dataclass(slots=True)
class _Error:
    """Mean of |predicted - realised| / realised; where nothing was realised, there is no error."""

    total: float = 0.0
    count: int = 0

    def add(self, predicted: float, realised: float) -> None:
        if realised > 0:
            self.total += abs(predicted - realised) / realised
            self.count += 1

    def __str__(self) -> str:
        return f"{self.total / self.count:.1%}" if self.count else "unknown"


@dataclass(slots=True)
class TraceSummary:
    """Running figures; feed it every step with `add`."""

    steps: int = 0
    speculating: int = 0
    tokens: int = 0
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)
    ms_error: _Error = field(default_factory=_Error)  # of drafting and verifying
    tokens_error: _Error = field(default_factory=_Error)  # over the decided steps that sampled any

    def add(self, step: StepTrace) -> None:
        """One more step."""
        self.steps += 1
        self.speculating += step.budget > 0
        self.tokens += step.realised_tokens
        if math.isfinite(step.predicted_verify_ms):  # else the step was decoded without a decision
            self.tokens_error.add(step.predicted_tokens, step.realised_tokens)
            if step.realised_verify_ms > 0:  # it was measured
                self.ms_error.add(step.predicted_ms, step.realised_ms)
        for part in step.drafters:
            stats = self.by_drafter.setdefault(part.name, DrafterStats())
            stats.num_draft_tokens += part.verified
            stats.num_accepted_draft_tokens += part.accepted

    def lines(self) -> list[str]:
        """For a person."""
        share = self.speculating / self.steps if self.steps else 0.0
        return [
            f"{self.steps} steps, {self.tokens} tokens, {share:.0%} of the steps with drafts",
            f"mean error of predictions: {self.ms_error} of ms, {self.tokens_error} of tokens",
            *(
                f"{name}: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted "
                f"({stats.draft_acceptance_rate:.0%})"
                if stats.num_draft_tokens
                else f"{name}: no drafts verified"
                for name, stats in sorted(self.by_drafter.items())
            ),
        ]


_COLUMNS = ("step", "seqs", "rows", "context", "cand.", "budget", "tokens", "ms", "tok/s")
_DRAFTERS_WIDTH = 16


def show_trace(steps: Collection[StepTrace], summary: TraceSummary, console: Console) -> None:
    """Print ``steps``; ``summary`` may be of more of them. Pairs read predicted/realised."""
    # Without a frame, so that the drafters' column has room on a terminal of 80 characters.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("drafters", overflow="fold", min_width=_DRAFTERS_WIDTH)
    for step in steps:
        table.add_row(*_cells(step))
    console.print(table)
    console.print("pairs: predicted/realised; drafters: decision, accepted/verified, text: tokens read", style="dim")
    for line in summary.lines():
        console.print(line, markup=False, highlight=False)


def _cells(step: StepTrace) -> list[str]:
    return [
        str(step.step),
        str(step.sequences),
        str(step.rows),
        f"{step.context:.0f}",
        str(step.candidates),
        str(step.budget),
        f"{step.predicted_tokens:.1f}/{step.realised_tokens}",
        f"{'-' if math.isnan(step.predicted_ms) else f'{step.predicted_ms:.1f}'}/{step.realised_ms:.1f}",
        f"{step.tokens_per_second:.1f}",
        ", ".join(_drafter(part) for part in step.drafters),
    ]


def _drafter(part: DrafterTrace) -> str:
    figures = f" {part.accepted}/{part.verified}" if part.verified else ""
    read = f" text {part.read}" if part.read else ""
    return f"{part.name} {part.decision}{figures}{read}"
