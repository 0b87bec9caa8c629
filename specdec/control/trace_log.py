"""The last steps' decisions in memory, and all of them in a file when asked."""

from __future__ import annotations

import logging
from collections import deque

from specdec.control.trace_file import TraceWriter
from specdec.types import StepTrace

logger = logging.getLogger(__name__)


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
            self._write(self._writer, step)
            step.replay = {}  # on disk now; the ring stays small
        self._ring.append(step)

    def _write(self, writer: TraceWriter, step: StepTrace) -> None:
        """A full disk ends the file, not the requests."""
        try:
            writer.write(step)
        except OSError as error:
            logger.error("the trace file can not be written any more (%s); it ends at step %d", error, step.step)
            self._writer, self.keeps_replay = None, False

    def last(self, limit: int) -> list[StepTrace]:
        """The newest ``limit`` steps, oldest first."""
        steps = list(self._ring)
        return steps[-limit:] if limit > 0 else []

    def close(self) -> None:
        """Finish the file."""
        writer, self._writer, self.keeps_replay = self._writer, None, False
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                logger.error("the end of the trace file could not be written (%s)", error)
