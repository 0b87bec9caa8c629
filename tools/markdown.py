"""Shared helpers of the tools that write parts of docs/: tables and section markers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def with_parts(document: str, parts: Mapping[str, str]) -> str:
    """``document`` with the text between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` replaced, for each of
    ``parts``.

    Raises:
        ValueError: a mark is missing, or occurs twice.
    """
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"the document needs {begin.strip()} and {end.strip()}, once each")
        head, rest = document.split(begin)
        document = f"{head}{begin}\n{text.strip()}\n\n{end}{rest.split(end)[1]}"
    return document


def row(*cells: str) -> str:
    """A row of a Markdown table, with ``|`` and ``<`` escaped."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def header(*names: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [row(*names), "|---" * len(names) + "|"]
