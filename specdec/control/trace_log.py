"""The last steps' decisions in memory, and all of them in a file when asked."""

from __future__ import annotations

from collections import deque

from specdec.control.trace_file import TraceWriter
from specdec.types import StepTrace


class TraceLog:
    """A bounded ring of `StepTrace`. ``keeps_replay``: whether steps should carry what a replay needs."""

    def __init__(self, steps: int, writer: TraceWriter | None = None) -> None:
        self._ring: deque[StepTrace] = deque(maxlen=steps)
        self._writer = writer
        self.keeps_replay = writer is not None
        self.enabled = steps > 0 or writer is not None
        self.count = 0

    def add(self, step: StepTrace) -> None:
        """The newest step."""
        self.count += 1
        if self._writer is not None:
            self._writer.write(step)
            step.replay = {}  # on disk now; the ring stays small
        self._ring.append(step)

    def last(self, limit: int) -> list[StepTrace]:
        """The newest ``limit`` steps, oldest first."""
        steps = list(self._ring)
        return steps[-limit:] if limit > 0 else []

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer, self.keeps_replay = None, False
