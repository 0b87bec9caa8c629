"""Index files: a text of tokens and its suffix array, memory-mapped, to find what followed a context in the text."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.atomic_file import replacing
from specdec.errors import ConfigError, ModelError
from specdec.models.checkpoint import check_regular

MAGIC = b"specdec index 1\n"
_LENGTH = struct.Struct("<II")  # bytes of the header, and their CRC-32
_ALIGN = 16  # bytes


class IndexText(ctypes.Structure):
    """The mapped arrays of an index. Mirrors IndexText in csrc/index.cpp."""

    _fields_ = (
        ("tokens", ctypes.c_void_p),  # [n], big-endian
        ("suffixes", ctypes.c_void_p),  # [n]
        ("starts", ctypes.c_void_p),  # [separator + 1]
        ("n", ctypes.c_int64),
        ("separator", ctypes.c_uint32),
    )


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file of the text."""

    path: str
    size: int  # bytes, when it was read
    mtime_ns: int  # when it was read
    start: int  # its first token's position in the text
    count: int  # tokens


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """Contents and sources of an index."""

    fingerprint: str  # of the tokenizer's vocabulary
    separator: int  # id after every file; none of the vocabulary
    tokens: int
    files_bytes: int  # of the list of files
    checksum: int  # CRC-32 of everything after the header
    roots: tuple[str, ...]  # `IndexSources`
    only: tuple[str, ...]
    exclude: tuple[str, ...]


class TokenIndex:
    """A mapped index file. It stays readable when the file is replaced.

    version: of the file, by `file_version`. check: verify the checksum, a third of a second for 250 MB.

    Raises:
        ConfigError: the file cannot be read, is no index, or is damaged.
    """

    def __init__(self, path: Path, *, check: bool = True) -> None:
        self.path = path
        try:
            if path.exists():
                check_regular(path)
            with path.open("rb") as file:
                self.version = file_version(os.fstat(file.fileno()))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ConfigError(f"index {path} does not exist; build it: specdec index PATH... --out FILE") from None
        except ModelError as error:
            raise ConfigError(f"index {error}; {_WAY_OUT}") from None
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise ConfigError(f"index {path} cannot be read ({reason}); {_WAY_OUT}") from None
        self.header, self._text = self._read_header()
        header = self.header
        sorted_at = self._text + 4 * header.tokens
        starts_at = sorted_at + 4 * header.tokens
        self._files_at = starts_at + 4 * (header.separator + 1)
        if len(self._map) != self._files_at + header.files_bytes:
            raise ConfigError(f"index {path} is cut short or has grown; {_WAY_OUT}")
        view = memoryview(self._map)
        if check and zlib.crc32(view[self._text :]) != header.checksum:
            raise ConfigError(f"index {path} is damaged (its checksum is wrong); {_WAY_OUT}")
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        arrays = (address + at for at in (self._text, sorted_at, starts_at))
        self.text = IndexText(*arrays, header.tokens, header.separator)

    def _read_header(self) -> tuple[IndexHeader, int]:
        """The header, and the byte at which the text begins."""
        data, start = self._map, len(MAGIC) + _LENGTH.size
        if data[: len(MAGIC)] != MAGIC or len(data) < start:
            raise ConfigError(f"{self.path} is no index of this version of specdec; {_WAY_OUT}")
        size, checksum = _LENGTH.unpack_from(data, len(MAGIC))
        text = data[start : start + size]
        if zlib.crc32(text) != checksum:
            raise ConfigError(f"index {self.path} is damaged (its header's checksum is wrong); {_WAY_OUT}")
        values: dict[str, Any] = json.loads(text)
        for name in ("roots", "only", "exclude"):
            values[name] = tuple(values[name])
        return IndexHeader(**values), _aligned(start + size)

    @property
    def files(self) -> list[IndexedFile]:
        """The files of the text, in order."""
        return [IndexedFile(*row) for row in json.loads(self._map[self._files_at :])]

    @property
    def tokens(self) -> np.ndarray:
        """The whole text, big-endian uint32 [tokens]."""
        return np.frombuffer(self._map, ">u4", self.header.tokens, self._text)


_WAY_OUT = "delete it and build it again: specdec index PATH... --out FILE"


def file_version(found: os.stat_result) -> tuple[int, int, int]:
    """Inode, size in bytes and modification time in ns: equal until the file is replaced."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def write_index(
    path: Path, header: dict[str, Any], tokens: np.ndarray, suffixes: np.ndarray, files: Seq[IndexedFile]
) -> int:
    """Write an index to ``path`` atomically and return its size in bytes. A new one is readable by its owner only; one
    that replaces another keeps its owner and mode.

    header: the fields of `IndexHeader` that do not follow from the other parameters. tokens, suffixes: [tokens].

    Raises:
        ConfigError: the file cannot be written.
    """
    assert sys.byteorder == "little"  # the format of the suffix array and of the machines that specdec runs on
    rows = [[f.path, f.size, f.mtime_ns, f.start, f.count] for f in files]
    starts = np.cumsum([0, *np.bincount(tokens, minlength=header["separator"])[: header["separator"]]])
    arrays = tokens.astype(">u4"), suffixes.astype("<u4"), starts.astype("<u4")
    parts: list[bytes | memoryview] = [*(each.data.cast("B") for each in arrays), json.dumps(rows).encode()]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    sizes = {"tokens": len(tokens), "files_bytes": len(parts[-1]), "checksum": checksum}
    text = json.dumps(header | sizes).encode()
    begin = MAGIC + _LENGTH.pack(len(text), zlib.crc32(text)) + text
    begin += bytes(_aligned(len(begin)) - len(begin))
    try:
        with replacing(path) as file:
            file.write(begin)
            for part in parts:
                file.write(part)
            return file.tell()
    except OSError as error:
        raise ConfigError(f"index {path} cannot be written ({error.strerror})") from None


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
