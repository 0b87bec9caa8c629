"""A text of a project that stands beside the one being completed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file or a part of one. ``time_ms``: when it was last looked at or changed, Unix time; those of the lowest
    ``score``, then the oldest, are left out first where not all fit."""

    filename: str
    text: str
    time_ms: int = 0
    score: float = 0.0
