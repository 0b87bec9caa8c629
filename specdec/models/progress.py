"""The callable by which long work reports its progress to a terminal, a log or a test."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, units done, units in all); a total of 0 means the size is not known
Progress = Callable[[str, int, int], None]


def silent(label: str, done: int, total: int) -> None:
    """Ignores progress."""
