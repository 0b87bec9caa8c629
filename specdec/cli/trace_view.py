"""The decision trace on a terminal: a table, a small plot, a summary."""

from __future__ import annotations

import math
from collections.abc import Collection

from rich.console import Console
from rich.table import Table

from specdec.cli.sparkline import ASCII_BARS, BARS, sparkline
from specdec.cli.trace_summary import TraceSummary
from specdec.types import DrafterTrace, StepTrace

_COLUMNS = ("step", "seqs", "rows", "context", "cand.", "budget", "tokens", "ms", "tok/s")
_DRAFTERS_WIDTH = 20
_PLOT_MARGIN = 34


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
    console.print("tokens and ms: predicted/realised; drafters: decision, accepted/verified", style="dim")
    for line in _plot(steps, console):
        console.print(line, markup=False, highlight=False, no_wrap=True)
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
        f"{step.predicted_ms:.1f}/{step.realised_ms:.1f}",
        f"{step.tokens_per_second:.1f}",
        ", ".join(_drafter(part) for part in step.drafters),
    ]


def _drafter(part: DrafterTrace) -> str:
    figures = f" {part.accepted}/{part.verified}" if part.verified else ""
    return f"{part.name} {part.decision}{figures}"


def _plot(steps: Collection[StepTrace], console: Console) -> list[str]:
    """Two lines per figure, on one scale, so that they can be compared by eye."""
    pairs = {
        "ms": ([s.predicted_ms for s in steps], [s.realised_ms for s in steps]),
        "tokens": ([s.predicted_tokens for s in steps], [float(s.realised_tokens) for s in steps]),
    }
    bars = BARS if console.encoding.startswith("utf") else ASCII_BARS
    width = max(8, console.width - _PLOT_MARGIN)
    lines = []
    for name, (predicted, realised) in pairs.items():
        top = max((v for v in (*predicted, *realised) if math.isfinite(v)), default=0.0)
        for kind, values in (("predicted", predicted), ("realised", realised)):
            lines.append(f"{name:6} {kind:9} {sparkline(values, top, width, bars)} 0..{top:.1f}")
    return lines
