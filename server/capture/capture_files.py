"""The files that captured requests lie in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from server.experiment.record_frame import frame, frames

MAGIC = b"SDCAP\x00\x00\x01"
"""How such a file begins; the last byte is the version of its layout."""

_PREFIX, _SUFFIX = "capture-", ".sdc"


class CaptureFiles:
    """Appends entries, each with one system call. A file of a sixteenth of ``max_bytes`` is followed by a new one, and
    the oldest go, so that all of them together stay below ``max_bytes``."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises OSError: the folder can not be made, or its files can not be written."""
        self._folder, self._max_bytes, self._size, self._fd = folder, max_bytes, 0, -1
        self._packer = msgpack.Packer(use_bin_type=True, unicode_errors="backslashreplace")
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one. Raises OSError: there is no room; ValueError: it is larger than an entry may be."""
        data = frame(self._packer.pack(entry))
        if self._size + len(data) > self._max_bytes // 16:
            self.close()
            self._open()
        self._append(data)

    def close(self) -> None:
        """Closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        found = files(self._folder)
        number = 1 + (int(found[-1].stem.removeprefix(_PREFIX)) if found else 0)
        room = self._max_bytes * 15 // 16
        sizes = {path: path.stat().st_size for path in found}
        for path in found:
            if sum(sizes.values()) <= room:
                break
            path.unlink()
            del sizes[path]
        path = self._folder / f"{_PREFIX}{number:08}{_SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0
        self._append(MAGIC)

    def _append(self, data: bytes) -> None:
        done = os.write(self._fd, data)
        if done != len(data):
            os.ftruncate(self._fd, self._size)
            raise OSError(28, "no room for an entry")
        self._size += done


def files(folder: Path) -> list[Path]:
    """The files of a folder, oldest first."""
    found = (path for path in folder.glob(f"{_PREFIX}*{_SUFFIX}") if path.stem.removeprefix(_PREFIX).isdigit())
    return sorted(found, key=lambda path: int(path.stem.removeprefix(_PREFIX)))


def read_entries(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole entry, file by file; what lies behind a torn or altered one in its file is passed over.

    Raises:
        OSError: a file can not be read.
    """
    for path in files(folder):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # the server has just dropped it
            continue
        if data[: len(MAGIC)] != MAGIC:
            continue
        for payload, _ in frames(data, len(MAGIC)):
            try:
                entry = msgpack.unpackb(payload, raw=False)
            except (ValueError, msgpack.UnpackException):
                break
            if isinstance(entry, dict):
                yield entry
