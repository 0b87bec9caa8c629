"""A gap in a text, to be filled in."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.client.context_file import ContextFile


@dataclass(frozen=True, slots=True)
class Fim:
    """What stands before and behind the gap. ``middle_prefix``: what the filling begins with; None leaves it to the
    server. ``extra``: other texts of the project. ``language``: as editors name it; empty: as ``file_name`` ends."""

    prefix: str
    suffix: str = ""
    middle_prefix: str | None = None
    extra: tuple[ContextFile, ...] = ()
    repo_name: str = ""
    file_name: str = ""
    language: str = ""
