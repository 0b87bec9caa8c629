"""A text of the project beside the one that is being written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file or a part of one. ``score``: how relevant, ``time_ms``: when it was last looked at or changed."""

    name: str
    text: str
    score: float = 0.0
    time_ms: int = 0
