"""Numbered append-only files that survive a kill: of lines, or of checksummed frames, whose torn ends are detected."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

_HEAD = struct.Struct("<II")  # length of the payload, CRC-32 of length and payload
_LENGTH = struct.Struct("<I")


def _checksum(payload: bytes) -> int:
    """The CRC-32 of the payload's length and the payload. With the length, zeros are not a valid frame."""
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


@dataclass(frozen=True)
class NumberedFiles:
    """One kind of file. The name is prefix, number, suffix."""

    prefix: str
    suffix: str
    digits: int  # of the number, at least
    magic: bytes = b""  # at the beginning of every file; the last byte is the version of the layout

    def paths(self, folder: Path) -> list[Path]:
        """The files of a folder, oldest first."""
        found = ((self._number(path), path) for path in folder.glob(f"{self.prefix}*{self.suffix}"))
        return [path for number, path in sorted((n, path) for n, path in found if n is not None)]

    def next_path(self, folder: Path) -> Path:
        """The path of the next new file."""
        found = self.paths(folder)
        number = (self._number(found[-1]) or 0) + 1 if found else 1
        return folder / f"{self.prefix}{number:0{self.digits}}{self.suffix}"

    def _number(self, path: Path) -> int | None:
        digits = path.name.removeprefix(self.prefix).removesuffix(self.suffix)
        return int(digits) if digits.isascii() and digits.isdigit() else None


@dataclass(frozen=True)
class FrameFiles(NumberedFiles):
    """Files of ``magic``, then msgpack values, one per frame."""

    def values(self, data: bytes) -> Iterator[tuple[Any, int]]:
        """The values in a file's ``data``, each with its end offset, up to the first that cannot be read."""
        end = len(self.magic)
        while end + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, end)
            begin, end = end + _HEAD.size, end + _HEAD.size + length
            payload = data[begin:end]
            if len(payload) != length or _checksum(payload) != checksum:  # torn or altered
                return
            yield msgpack.unpackb(payload, raw=False, strict_map_key=False), end

    def frame(self, value: Any) -> bytes:
        """``value`` as a frame to append: its length and checksum, then the value."""
        payload: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="backslashreplace")
        return _HEAD.pack(len(payload), _checksum(payload)) + payload


class NumberedWriter:
    """Appends to new files, with one system call each time. Files of earlier runs stay unchanged."""

    def __init__(self, folder: Path, kind: NumberedFiles, *, sync: bool) -> None:
        """sync: fsync each file when it is closed.

        Raises:
            OSError: the folder cannot be created or written to.
        """
        self._folder, self._kind, self._sync = folder, kind, sync
        self._fd = -1
        self.path: Path | None = None  # of the open file
        self.size = 0  # bytes in it
        folder.mkdir(parents=True, exist_ok=True)

    def begin_file(self, head: bytes = b"") -> None:
        """Continue in a new file, which begins with the magic and ``head``.

        Raises:
            OSError: it cannot be created or written. None is left, and the previous file stays open.
        """
        path = self._kind.next_path(self._folder)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            size = _append(fd, 0, self._kind.magic + head)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        before, self._fd, self.size, self.path = self._fd, fd, size, path
        self._close(before)

    def append(self, data: bytes) -> None:
        """Append data. Raises OSError if the disk is full; the file is then unchanged."""
        self.size = _append(self._fd, self.size, data)

    def close(self) -> None:
        """Idempotent. Raises OSError if the disk fails; the file is closed in any case."""
        fd, self._fd = self._fd, -1
        self._close(fd)

    def _close(self, fd: int) -> None:
        if fd < 0:
            return
        try:
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)


def _append(fd: int, size: int, data: bytes) -> int:
    """Append ``data`` to a file of ``size`` bytes, completely or not at all; returns the new size. Raises OSError."""
    done = os.write(fd, data)
    if done != len(data):  # a full disk takes a part; what is written next must not follow it
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return size + done
