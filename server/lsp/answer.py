"""What a completion session answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A suggestion that was made to its end. ``suggestion_id``: to be named when its outcome is told."""

    suggestion_id: str
    text: str
