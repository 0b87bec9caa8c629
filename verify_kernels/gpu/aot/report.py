"""The report on compiled kernels, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import triton

from verify_kernels.gpu.aot.row import Row

_HEAD = ("case", "target", "threads", "regs", "spills", "shared", "s")
_LINE = 160  # characters of a problem that a table shows


def table(rows: Sequence[Row]) -> str:
    """Rows as text columns, the case first."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def problem_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each problem: which case, which chip, what."""
    return [f"{row.job.label} {row.job.target}: {_brief(text)}" for row in rows for text in row.problems]


def as_json(rows: Sequence[Row]) -> str:
    """Everything, problems in full."""
    data: dict[str, Any] = {"triton": triton.__version__, "rows": [row.as_json() for row in rows]}
    return json.dumps(data, indent=1) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    usage = row.usage
    numbers = ("-",) * 4 if usage is None else (usage.threads, usage.registers, usage.spills, usage.shared)
    return (row.job.label, row.job.target, *map(str, numbers), f"{row.seconds:.1f}")


def _brief(text: str) -> str:
    """First and last line: what kind of error it is, and what the compiler says it is about."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    brief = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return brief if len(brief) <= _LINE else brief[:_LINE] + "..."
