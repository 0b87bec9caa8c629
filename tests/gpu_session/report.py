"""The report of a session as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(report: Mapping[str, Any]) -> str:
    """Facts, the status of every task, the smallest shape on which each failing kernel fails, and figures."""
    tasks: Mapping[str, Any] = report["tasks"]
    counts = {status: sum(task["status"] == status for task in tasks.values()) for status in _STATUSES}
    lines = ["# GPU report", "", *(f"- {name}: {value}" for name, value in report["facts"].items())]
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items() if count)]
    lines += ["", *_table(("stage", "task", "status", "s", "note"), [_row(name, t) for name, t in tasks.items()])]
    lines += _failing(tasks)
    for name, task in tasks.items():
        lines += _figures(name, task["result"])
    return "\n".join(lines)


_STATUSES = ("passed", "failed", "skipped", "unfinished", "waiting")
_NOTE = 160  # characters of a note in a table


def _row(name: str, task: Mapping[str, Any]) -> tuple[str, ...]:
    result = task["result"] if isinstance(task["result"], Mapping) else {}
    counted = f"{result['passed']} shapes agree, {result['failed']} fail" if "largest_error" in result else ""
    note = "; ".join(filter(None, (counted, *task["note"].strip().splitlines()[-1:])))
    return task["stage"], name, task["status"], f"{task['seconds']:.0f}", note[:_NOTE]


def _failing(tasks: Mapping[str, Any]) -> list[str]:
    rows = [
        (name, worst["shape"], worst["message"][:_NOTE])
        for name, task in tasks.items()
        if isinstance(task["result"], Mapping) and (worst := task["result"].get("smallest_failing"))
    ]
    return ["", "## Smallest shape that fails", "", *_table(("task", "shape", "what is wrong"), rows)] if rows else []


def _figures(name: str, result: Any) -> list[str]:
    """Every list of flat records in a task's result, the cases of kernels apart."""
    lines: list[str] = []
    for part, records in result.items() if isinstance(result, Mapping) and "cases" not in result else ():
        flat = [record for record in records if isinstance(record, Mapping)] if isinstance(records, list) else []
        heads = list(dict.fromkeys(key for record in flat for key, value in record.items() if _is_cell(value)))
        if heads:
            rows = [tuple(_cell(record.get(head)) for head in heads) for record in flat]
            lines += ["", f"## {name}: {part}", "", *_table(tuple(heads), rows)]
    return lines


def _is_cell(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    return "" if not _is_cell(value) or value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [heads, ("---",) * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
