"""A text of tokens and its suffix array in one memory-mapped file: what followed a context, anywhere in the text."""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import tempfile
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import ConfigError

MAGIC = b"specdec index 1\n"
_LENGTH = struct.Struct("<II")  # the header's bytes, and their CRC-32
_ALIGN = 16
LONGEST = 32  # tokens of a context that are looked for; a longer match predicts no better
SHORTEST = 2  # a single token is followed by nearly anything
SAMPLES = 16  # places looked at of a context that occurs more often

Span = tuple["TokenIndex", int, int, int, int]
"""(index, low, high, length, token): entries low to high of the suffix array, which begin with the same ``length``
tokens; with a ``token`` >= 0 only those of them count whose last of these tokens it is."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One file of the text: ``count`` tokens from ``start`` on, read when it had this size and modification time."""

    path: str
    size: int
    mtime_ns: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """What an index was made of. ``fingerprint``: of the tokenizer's vocabulary. ``separator``: the id, none of the
    vocabulary's, that stands behind every file. ``roots``, ``only``, ``exclude``: what was asked for."""

    fingerprint: str
    separator: int
    tokens: int
    files_bytes: int
    checksum: int
    roots: tuple[str, ...]
    only: tuple[str, ...]
    exclude: tuple[str, ...]


class TokenIndex:
    """An index file, mapped; it stays readable when another takes its place.

    ``stamp`` tells the file from one that replaced it. check: whether its text is held against its checksum, which
    takes a third of a second for 250 MB.

    Raises:
        ConfigError: it can not be read, is none, or is damaged; names the file and the way out.
    """

    def __init__(self, path: Path, *, check: bool = True) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.stamp = stamp_of(os.fstat(file.fileno()))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ConfigError(f"index {path} is not there; build it: specdec index PATH... --out FILE") from None
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise ConfigError(f"index {path} can not be read ({reason}); {_WAY_OUT}") from None
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
        self._swapped = view[self._text : sorted_at].cast("I")  # tokens, bytes reversed: quicker to read, and as good
        self.suffixes = view[sorted_at:starts_at].cast("I")
        self._starts = view[starts_at : self._files_at].cast("I")

    def _read_header(self) -> tuple[IndexHeader, int]:
        """The header, and where the text begins."""
        data, start = self._map, len(MAGIC) + _LENGTH.size
        if data[: len(MAGIC)] != MAGIC or len(data) < start:
            raise ConfigError(f"{self.path} is no index, or one of another version of specdec; {_WAY_OUT}")
        size, checksum = _LENGTH.unpack_from(data, len(MAGIC))
        text = data[start : start + size]
        if zlib.crc32(text) != checksum:
            raise ConfigError(f"index {self.path} is damaged (its header is); {_WAY_OUT}")
        values: dict[str, Any] = json.loads(text)
        for name in ("roots", "only", "exclude"):
            values[name] = tuple(values[name])
        return IndexHeader(**values), _aligned(start + size)

    @property
    def files(self) -> list[IndexedFile]:
        """The files of the text, in its order."""
        return [IndexedFile(*row) for row in json.loads(self._map[self._files_at :])]

    @property
    def tokens(self) -> np.ndarray:
        """The whole text, big-endian uint32 [tokens]."""
        return np.frombuffer(self._map, ">u4", self.header.tokens, self._text)

    def match(self, context: Seq[int]) -> list[Span]:
        """The longest suffix of ``context`` that something in the text begins with, and one or two of a half and a
        quarter of its length where these occur more often; longest first, none below `SHORTEST` tokens."""
        context = context[-LONGEST:]
        if not context or max(context) >= self.header.separator or min(context) < 0:
            return []
        window = struct.pack(f">{len(context)}I", *context)
        low, high, length = self._longest(context, window)
        found: list[Span] = []
        while length >= SHORTEST:
            if not found or high - low > found[-1][2] - found[-1][1]:
                found.append((self, low, high, length, -1))
            length //= 2
            if length >= SHORTEST:
                low = self._lower(context[-length], window[-4 * length :])
                high = self._upper(context[-length], window[-4 * length :], low)
        return found

    def _longest(self, context: Seq[int], window: bytes) -> tuple[int, int, int]:
        """Where in the suffix array the longest suffix of ``context`` that occurs stands, and its length; length 0 if
        it has less than `SHORTEST` tokens. ``window``: the context's bytes."""
        data, text, suffixes = self._map, self._text, self.suffixes
        best = length = 0
        above, middle = len(context) + 1, SHORTEST  # `above` does not occur
        while middle < above:
            pattern = window[-4 * middle :]
            low = self._lower(context[-middle], pattern)
            start = text + 4 * suffixes[low] if low < len(suffixes) else 0
            if data[start : start + 4 * middle] == pattern:
                best, length = low, middle
            else:
                above = middle
            if above - max(length, SHORTEST - 1) <= 1:
                break
            middle = min(2 * middle, (length + above) // 2)  # most matches are short
        if not length:
            return 0, 0, 0
        return best, self._upper(context[-length], window[-4 * length :], best), length

    def _lower(self, first: int, pattern: bytes) -> int:
        """The first entry of the suffix array that is not before ``pattern``, which begins with token ``first``."""
        data, text, size = self._map, self._text, len(pattern)
        return bisect_left(
            self.suffixes, pattern, self._starts[first], self._starts[first + 1],
            key=lambda p: data[text + 4 * p : text + 4 * p + size],
        )  # fmt: skip

    def _upper(self, first: int, pattern: bytes, low: int) -> int:
        """The end of the entries from ``low`` on that begin with ``pattern``."""
        data, text, size = self._map, self._text, len(pattern)
        return bisect_right(
            self.suffixes, pattern, low, self._starts[first + 1],
            key=lambda p: data[text + 4 * p : text + 4 * p + size],
        )  # fmt: skip

    def followers(self, low: int, high: int, length: int, token: int) -> list[tuple[int, int, Span]]:
        """(token, how often, the context with it) of what followed the span ``(self, low, high, length, token)``.

        Of a context that occurs often, evenly spaced places are looked at, and the numbers are estimates.
        """
        if token >= 0:
            low, high = self._narrow(low, high, length - 1, token)
        suffixes, text = self.suffixes, self._swapped
        first = text[suffixes[low] + length]
        if first == text[suffixes[high - 1] + length]:
            token = _swap(first)
            return [] if token == self.header.separator else [(token, high - low, (self, low, high, length + 1, -1))]
        places = self._places(low, high)
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
                # The first and the last of them lie somewhere between this place and the ones beside it.
                least, most = places[i - 1] if i else low, places[end] if end < n else high
                found.append((token, count, (self, least, most, length + 1, token)))
            i = end
        return found

    @staticmethod
    def _places(low: int, high: int) -> Seq[int]:
        size = high - low
        return range(low, high) if size <= SAMPLES else [low + i * size // SAMPLES for i in range(SAMPLES)]

    def _narrow(self, low: int, high: int, offset: int, token: int) -> tuple[int, int]:
        data, text, suffixes, pattern = self._map, self._text + 4 * offset, self.suffixes, struct.pack(">I", token)

        def at_offset(p: int) -> bytes:
            return data[text + 4 * p : text + 4 * p + 4]

        low = bisect_left(suffixes, pattern, low, high, key=at_offset)
        return low, bisect_right(suffixes, pattern, low, high, key=at_offset)


def _swap(value: int) -> int:
    return int.from_bytes(value.to_bytes(4, "little"), "big")


_WAY_OUT = "delete it and build it again: specdec index PATH... --out FILE"


def stamp_of(found: os.stat_result) -> tuple[int, int, int]:
    """What tells one version of a file from the next."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def write_index(
    path: Path, header: dict[str, Any], tokens: np.ndarray, suffixes: np.ndarray, files: Seq[IndexedFile]
) -> int:
    """Put an index in the place of ``path`` at once, readable by its owner only; returns its bytes.

    header: fields of `IndexHeader` that do not follow from the rest. tokens, suffixes: [tokens].

    Raises:
        ConfigError: it can not be written.
    """
    assert sys.byteorder == "little"  # as every machine that specdec runs on
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
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(begin)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"index {path} can not be written ({error.strerror})") from None
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
