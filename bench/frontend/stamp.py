"""Times that travel in the text of a stream, from the engine's process to whoever reads it."""

from __future__ import annotations

import time

_END = ";"
_WIDTH = 18  # digits of a monotonic clock's nanoseconds, for centuries


def now_ns() -> int:
    """The machine's clock, the same in every process."""
    return time.monotonic_ns()


def stamp(*times_ns: int) -> str:
    """``times_ns`` as text."""
    return "".join(f"{t:0{_WIDTH}d}{_END}" for t in times_ns)


def read_stamps(text: str) -> list[int]:
    """The times in ``text``, in nanoseconds.

    Raises:
        ValueError: it holds something else.
    """
    *parts, rest = text.split(_END)
    if rest:
        raise ValueError(f"{text!r} is not a stamp")
    return [int(part) for part in parts]
