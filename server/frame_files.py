"""Numbered append-only files of frames in a folder: what was written survives a kill, what is torn is noticed."""

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

MAX_PAYLOAD = 16 << 20


def frame(payload: bytes) -> bytes:
    """The payload with its length and checksum. The checksum covers the length, so a run of zeros is no frame.

    Raises:
        ValueError: the payload exceeds `MAX_PAYLOAD` bytes.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record takes at most {MAX_PAYLOAD} bytes, this one {len(payload)}: leave the prompt out")
    return _HEAD.pack(len(payload), _checksum(payload)) + payload


def frames(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Payloads from ``start`` on, each with the offset behind it, up to the first frame that is torn or altered."""
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, start)
        begin, start = start + _HEAD.size, start + _HEAD.size + length
        payload = data[begin:start]
        if len(payload) != length or _checksum(payload) != checksum:
            return
        yield payload, start


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))


@dataclass(frozen=True)
class FrameFiles:
    """One kind of file: its name is prefix, number (of at least so many digits) and suffix; it begins with ``magic``,
    whose last byte is the version of its layout, and msgpack values follow, a frame each."""

    prefix: str
    suffix: str
    digits: int
    magic: bytes

    def paths(self, folder: Path) -> list[Path]:
        """The files of a folder, oldest first."""
        found = ((self._number(path), path) for path in folder.glob(f"{self.prefix}*{self.suffix}"))
        return [path for number, path in sorted((n, path) for n, path in found if n is not None)]

    def next_path(self, folder: Path) -> Path:
        """The name of the file to come."""
        found = self.paths(folder)
        number = (self._number(found[-1]) or 0) + 1 if found else 1
        return folder / f"{self.prefix}{number:0{self.digits}}{self.suffix}"

    def values(self, data: bytes) -> Iterator[tuple[Any, int]]:
        """The values in a file's ``data``, each with the offset behind it, up to the first that can not be read."""
        for payload, end in frames(data, len(self.magic)):
            try:
                value = msgpack.unpackb(payload, raw=False, strict_map_key=False)
            except (ValueError, msgpack.UnpackException):
                return
            yield value, end

    def _number(self, path: Path) -> int | None:
        digits = path.name.removeprefix(self.prefix).removesuffix(self.suffix)
        return int(digits) if digits.isascii() and digits.isdigit() else None


class FrameWriter:
    """Writes values, each with one system call, into files that it makes: a file whose end was torn stays as it is.
    ``size``: bytes in the file that is open. ``sync``: wait for the disk whenever a file is closed.

    Raises:
        OSError: the folder can not be made, or nothing can be written there.
    """

    def __init__(self, folder: Path, kind: FrameFiles, *, sync: bool) -> None:
        self._folder, self._kind, self._sync = folder, kind, sync
        self._packer = msgpack.Packer(use_bin_type=True, unicode_errors="backslashreplace")
        self._fd = -1
        self.size = 0
        folder.mkdir(parents=True, exist_ok=True)

    def frame(self, value: Any) -> bytes:
        """``value`` as it is appended. Raises ValueError: it is too large."""
        return frame(self._packer.pack(value))

    def begin_file(self, head: bytes = b"") -> None:
        """Go on in a new file, which begins with ``head`` behind its magic. Raises OSError."""
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._fd = os.open(self._kind.next_path(self._folder), flags, 0o600)
        self.size = 0
        self.append(self._kind.magic + head)

    def append(self, data: bytes) -> None:
        """Append frames. Raises OSError when the disk is full: they are then not in the file, others are."""
        done = os.write(self._fd, data)
        if done != len(data):  # a full disk takes a part; the next frame must not follow a torn one
            os.ftruncate(self._fd, self.size)
            raise OSError(errno.ENOSPC, "no room for a record; free some space", str(self._folder))
        self.size += done

    def close(self) -> None:
        """Closing twice does nothing."""
        if self._fd >= 0:
            if self._sync:
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
