"""Detects changed files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

EVERY_S = 0.5
_Mark = tuple[int, ...] | None


class FileWatch:
    """Checks on demand, at most every ``every_s`` seconds, without thread or task. Creation and removal count as
    changes.

    Create it before the first read of the files, so that no change is missed.
    """

    def __init__(
        self, paths: Sequence[Path], every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths, self._every_s, self._clock = list(paths), every_s, clock
        self._marks = self._look()
        self._looked_at = clock()

    def changed(self) -> bool:
        """Whether any file changed since the last call that returned True."""
        now = self._clock()
        if now - self._looked_at < self._every_s:
            return False
        self._looked_at = now
        marks = self._look()
        if marks == self._marks:
            return False
        self._marks = marks
        return True

    def _look(self) -> list[_Mark]:
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> _Mark:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)
