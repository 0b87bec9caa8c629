"""Writes the code map into docs/architecture.md from the files' own first lines (`make map`), between marks."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path


def with_parts(document: str, parts: Mapping[str, str]) -> str:
    """``document`` with what stands between ``<!-- NAME -->`` and ``<!-- end of NAME -->`` replaced, for each of
    ``parts``.

    Raises:
        ValueError: a mark is missing, or there twice.
    """
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"the document needs {begin.strip()} and {end.strip()}, once each")
        head, rest = document.split(begin)
        document = f"{head}{begin}\n{text.strip()}\n\n{end}{rest.split(end)[1]}"
    return document


def row(*cells: str) -> str:
    """A row of a Markdown table; what would end a cell or begin a tag is escaped."""
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|").replace("<", "\\<") for cell in cells) + " |"


def header(*names: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [row(*names), "|---" * len(names) + "|"]


REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENT = REPOSITORY / "docs" / "architecture.md"
ROOMS = ("specdec", "draft", "verify_kernels", "server", "bench")
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->\n"


def code_map() -> str:
    """One line per source file, grouped by folder."""
    lines = []
    for room in ROOMS:
        folders = sorted(
            {p.parent for p in (REPOSITORY / room).rglob("*") if p.suffix in {".py", ".cpp", ".h", ".proto"}}
        )
        for folder in folders:
            if "__pycache__" in folder.parts:
                continue
            lines.append(f"\n**{folder.relative_to(REPOSITORY)}/** {_about(folder)}\n")
            files = sorted(p for p in folder.iterdir() if p.suffix in {".py", ".cpp", ".h", ".proto"})
            wanted = [p for p in files if p.name != "__init__.py" and "_pb2" not in p.name]
            lines += [f"- `{p.name}` {_first_line(p)}" for p in wanted]
    return "\n".join(lines).strip() + "\n"


def updated(document: str) -> str:
    """``document`` with its map brought up to date."""
    head, rest = document.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + "\n" + code_map() + "\n" + END + tail


def _about(folder: Path) -> str:
    init = folder / "__init__.py"
    return _first_line(init) if init.exists() else ""


def _first_line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    comments = [line[2:].strip() for line in text.splitlines() if line.startswith("//")]
    return comments[0] if comments else ""


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
