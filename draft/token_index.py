"""Index files: a text of tokens and its suffix array, memory-mapped, to find what followed a context in the text."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
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
MAX_CONTEXT_TOKENS = 32  # tokens of a context that are looked up; a longer match predicts no better
SAMPLES = 16  # occurrences that are inspected of a more frequent context

Span = tuple["TokenIndex", int, int, int, int]
"""(index, low, high, length, token): entries [low, high) of the suffix array, which share their first ``length``
tokens. If ``token`` >= 0, only the entries count in which it is the last of these tokens."""


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
        self._swapped = view[self._text : sorted_at].cast("I")  # tokens with reversed bytes: faster to read
        self.suffixes = view[sorted_at:starts_at].cast("I")
        self._starts = view[starts_at : self._files_at].cast("I")

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

    def match(self, context: Seq[int]) -> list[Span]:
        """The longest suffix of ``context`` in the text, and suffixes of half and a quarter of its length that occur
        more often. Longest first."""
        context = context[-MAX_CONTEXT_TOKENS:]
        if not context or max(context) >= self.header.separator or min(context) < 0:
            return []
        window = struct.pack(f">{len(context)}I", *context)
        low, high, length = self._longest(context, window)
        found: list[Span] = []
        while length:
            if not found or high - low > found[-1][2] - found[-1][1]:
                found.append((self, low, high, length, -1))
            length //= 2
            if length:
                low = self._lower(context[-length], window[-4 * length :])
                high = self._upper(context[-length], window[-4 * length :], low)
        return found

    def _longest(self, context: Seq[int], window: bytes) -> tuple[int, int, int]:
        """(low, high, length): entries of the suffix array that begin with the longest suffix of ``context``.

        Length 0: not even the last token occurs. window: the bytes of ``context``.
        """
        data, text, suffixes = self._map, self._text, self.suffixes
        best = length = 0
        least, most = 1, len(context)  # the lengths that are still in question
        while least <= most:
            middle = min(2 * least - 1, (least + most) // 2)  # most matches are short
            pattern = window[-4 * middle :]
            low = self._lower(context[-middle], pattern)
            start = text + 4 * suffixes[low] if low < len(suffixes) else 0
            if data[start : start + 4 * middle] == pattern:
                best, length, least = low, middle, middle + 1
            else:
                most = middle - 1
        if not length:
            return 0, 0, 0
        return best, self._upper(context[-length], window[-4 * length :], best), length

    def _lower(self, first: int, pattern: bytes) -> int:
        """The first entry that is not less than ``pattern``, which begins with token ``first``."""
        low, high = self._starts[first], self._starts[first + 1]
        return bisect_left(self.suffixes, pattern, low, high, key=self._slice(0, len(pattern)))

    def _upper(self, first: int, pattern: bytes, low: int) -> int:
        """The end of the entries from ``low`` on that begin with ``pattern``."""
        return bisect_right(self.suffixes, pattern, low, self._starts[first + 1], key=self._slice(0, len(pattern)))

    def _slice(self, offset: int, size: int) -> Callable[[int], bytes]:
        """Function position -> ``size`` bytes of the text from ``offset`` tokens after it."""
        data, text = self._map, self._text + 4 * offset
        return lambda p: data[text + 4 * p : text + 4 * p + size]

    def followers(self, low: int, high: int, length: int, token: int) -> list[tuple[int, int, Span]]:
        """(token, count, context that ends in it) of what follows the span ``(self, low, high, length, token)``.

        For a frequent context, counts are estimated from `SAMPLES` evenly spaced occurrences.
        """
        if token >= 0:
            low, high = self._narrow(low, high, length - 1, token)
        suffixes, text = self.suffixes, self._swapped
        first = text[suffixes[low] + length]
        if first == text[suffixes[high - 1] + length]:
            token = _swap(first)
            return [] if token == self.header.separator else [(token, high - low, (self, low, high, length + 1, -1))]
        size = high - low
        places = range(low, high) if size <= SAMPLES else [low + i * size // SAMPLES for i in range(SAMPLES)]
        seen = [text[suffixes[place] + length] for place in places]
        found: list[tuple[int, int, Span]] = []
        n, i = len(seen), 0
        while i < n:
            swapped, end = seen[i], i + 1
            while end < n and seen[end] == swapped:
                end += 1
            token = _swap(swapped)
            if token != self.header.separator:
                count = max(1, (end - i) * (high - low) // n)
                # The token's first and last entries lie between these samples and their neighbours.
                least, most = places[i - 1] if i else low, places[end] if end < n else high
                found.append((token, count, (self, least, most, length + 1, token)))
            i = end
        return found

    def _narrow(self, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
        """The entries in [low, high) with ``token`` after ``offset`` tokens."""
        pattern, key = struct.pack(">I", token), self._slice(offset, 4)
        low = bisect_left(self.suffixes, pattern, low, high, key=key)
        return low, bisect_right(self.suffixes, pattern, low, high, key=key)


def _swap(value: int) -> int:
    return int.from_bytes(value.to_bytes(4, "little"), "big")


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
