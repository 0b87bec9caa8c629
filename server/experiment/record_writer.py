"""Appends records to the files of an experiment."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import msgpack

from server.experiment.record import RECORD_FIELDS, Record, to_row
from server.experiment.record_frame import frame
from server.experiment.record_segments import MAGIC, next_segment


class RecordWriter:
    """Writes one frame per record, each with one system call: what was written survives the death of the process.

    Files are opened only to append, and only new ones: a file whose end was torn stays as it is.
    """

    def __init__(self, folder: Path, max_bytes: int = 64 << 20) -> None:
        """``max_bytes``: a file of at least this size is followed by a new one.

        Raises:
            OSError: the folder can not be made, or its files can not be written.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._packer = msgpack.Packer(use_bin_type=True, unicode_errors="backslashreplace")
        self._fd = -1
        self._size = 0
        self._open()

    def write(self, record: Record) -> None:
        """Append a record. Raises OSError when the disk is full: the record is then not in the file, others are."""
        if self._size >= self._max_bytes:
            self.close()
            self._open()
        data = frame(self._packer.pack(to_row(record)))
        self._append(data)

    def close(self) -> None:
        """Hand everything to the disk. Closing twice does nothing."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        path = next_segment(self._folder)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
        self._append(MAGIC + frame(self._packer.pack(RECORD_FIELDS)))

    def _append(self, data: bytes) -> None:
        done = os.write(self._fd, data)
        if done != len(data):  # a full disk takes a part; the next record must not follow a torn one
            os.ftruncate(self._fd, self._size)
            raise OSError(28, f"{self._folder}: no room for a record; free some space")
        self._size += done

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
