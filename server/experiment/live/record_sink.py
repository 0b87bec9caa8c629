"""Writes records in a thread of its own, so that neither a request nor the event loop ever waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from server.experiment.record import Record
from server.experiment.record_writer import RecordWriter

_LOG = logging.getLogger(__name__)


class RecordSink:
    """``on_error`` is told, in the thread, when a record could not be written; nothing is written after that.

    Raises:
        OSError: the folder can not be written to.
    """

    def __init__(self, folder: Path, on_error: Callable[[str], None]) -> None:
        self._writer, self._on_error = RecordWriter(folder), on_error
        self._waiting: SimpleQueue[Callable[[], Record] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="experiment-records", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], Record]) -> None:
        """Have the record written that ``make`` gives; returns at once."""
        self._waiting.put(make)

    def close(self) -> None:
        """Write what waits, hand it to the disk, and end. May wait for the disk."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        broken = False
        while (make := self._waiting.get()) is not None:
            if broken:
                continue
            try:
                self._writer.write(make())
            except OSError as error:
                broken = True
                self._on_error(f"records can not be written: {error}")
            except Exception:
                _LOG.exception("a record of an experiment is lost")
        try:
            self._writer.close()
        except OSError as error:
            self._on_error(f"records can not be written: {error}")
