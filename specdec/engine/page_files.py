"""Pages of the prefix cache in files: append-only segments, in a bounded folder that one process owns."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from specdec.core.kv_cache import KEY_BYTES

_MAKE = b"specdec pages "  # a segment of any layout begins with it
_MAGIC = _MAKE + b"3\n"  # raise the number when the layout changes
_DIGEST_BYTES = 8  # of XXH3, 64 bits
_SUFFIX = ".pages"
_FINGERPRINT = re.compile("[0-9a-f]{32}")  # the name of a fingerprint's folder
_FIELDS = KEY_BYTES + _DIGEST_BYTES  # before a page's keys and values: its key, and their digest
_SEGMENTS = 16  # that a full folder is cut into; the oldest is removed at a time
_MAX_SEGMENT_BYTES = 256 << 20


class DamagedPageError(Exception):
    """A record's bytes are not those that were written for the page."""


@dataclass(slots=True, eq=False)
class Segment:
    """A file: a header, then records of equal size."""

    path: Path
    keys: list[bytes] = field(default_factory=list)
    """By place of the record."""
    n_bytes: int = 0


class PageFiles:
    """The pages of one numeric fingerprint: ``folder / fingerprint / NUMBER.pages``.

    Thread-safe. A page's key stands for its tokens, those before them and the salt; before the page is used, key and
    digest are compared. Nothing is synchronised to the disk: what a crash of the system damages is a
    `DamagedPageError` later.

    payload_bytes: of a page's keys and values. max_bytes: of all segments below ``folder``, those of other fingerprints
    included unless another process owns them. The oldest are removed first.

    Raises:
        OSError: the folder cannot be used; a `BlockingIOError`: another process owns it.
        ValueError: ``max_bytes`` is less than two pages need.
    """

    def __init__(self, folder: Path, fingerprint: str, payload_bytes: int, max_bytes: int) -> None:
        self.record_bytes = _FIELDS + payload_bytes
        self._header = _MAGIC + fingerprint.encode()[:32].ljust(32) + struct.pack("<Q", payload_bytes)
        self._header_bytes = len(self._header)
        if max_bytes < 2 * (self._header_bytes + self.record_bytes):
            raise ValueError(f"a page needs {self.record_bytes} bytes on disk, so {max_bytes} are too few")
        self._max_bytes, self._segment_bytes = max_bytes, min(_MAX_SEGMENT_BYTES, max_bytes // _SEGMENTS)
        self._folder = folder / fingerprint
        self._mutex = threading.Lock()
        self._index: dict[bytes, tuple[Segment, int]] = {}
        self._segments: OrderedDict[int, Segment] = OrderedDict()  # by number, oldest first; the last takes pages
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(self._folder)
        self._lock = _locked(self._folder)
        try:
            self._scan()
            self._others = _other_segments(folder, self._folder)
            own = sum(segment.n_bytes for segment in self._segments.values())
            self.n_bytes = own + sum(n_bytes for _, n_bytes in self._others)  # of all segments
            self._make_room()
        except BaseException:
            os.close(self._lock)
            raise

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity_pages(self) -> int:
        """Pages that the bound allows."""
        return self._max_bytes // self.record_bytes

    def buffer(self) -> bytearray:
        """A buffer for one record."""
        return bytearray(self.record_bytes)

    @staticmethod
    def payload(buffer: bytearray) -> memoryview:
        """The part of a record that holds the page's keys and values."""
        return memoryview(buffer)[_FIELDS:]

    def append(self, key: bytes, buffer: bytearray) -> list[bytes]:
        """Write the page of ``key``, whose payload is in ``buffer``; returns keys that were removed to make room.

        Raises:
            OSError: it cannot be written; nothing has changed.
        """
        buffer[:_FIELDS] = _fields(key, self.payload(buffer))
        with self._mutex:
            segment = self._last_segment()
            with _opened(segment.path, os.O_WRONLY | os.O_CREAT) as descriptor:
                count = os.pwrite(descriptor, buffer, segment.n_bytes)
            if count != len(buffer):  # a full disk; the next write goes to the same place
                raise OSError(f"{segment.path}: only {count} of {len(buffer)} bytes were written")
            self._index[key] = segment, len(segment.keys)
            segment.keys.append(key)
            segment.n_bytes += self.record_bytes
            self.n_bytes += self.record_bytes
            return self._make_room()

    def read(self, key: bytes, buffer: bytearray) -> None:
        """Read the page of ``key`` into ``buffer``.

        Raises:
            KeyError: it is not stored any more.
            DamagedPageError: its record holds something else; it is forgotten.
            OSError: its record cannot be read; it is forgotten.
        """
        segment, place = self._index[key]
        try:
            with _opened(segment.path, os.O_RDONLY) as descriptor:
                count = os.preadv(descriptor, [buffer], self._header_bytes + place * self.record_bytes)
            if count != self.record_bytes or buffer[:_FIELDS] != _fields(key, self.payload(buffer)):
                raise DamagedPageError(f"{segment.path}: record {place}")
        except (OSError, DamagedPageError):
            with self._mutex:
                self._index.pop(key, None)
            raise

    def erase(self) -> None:
        """Remove every page of this fingerprint."""
        with self._mutex:
            while self._segments:
                self._remove_oldest()

    def close(self) -> None:
        """Let another process own the folder."""
        with self._mutex:
            os.close(self._lock)

    def _last_segment(self) -> Segment:
        """The last segment if it has room for a page, else a new one."""
        last = next(reversed(self._segments), 0)
        if last and self._segments[last].n_bytes + self.record_bytes <= self._segment_bytes:
            return self._segments[last]
        path = self._folder / f"{last + 1:010d}{_SUFFIX}"
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            count = os.write(descriptor, self._header)
        if count != self._header_bytes:
            raise OSError(f"{path}: only {count} of {self._header_bytes} bytes were written")
        segment = self._segments[last + 1] = Segment(path, n_bytes=self._header_bytes)
        self.n_bytes += segment.n_bytes
        return segment

    def _make_room(self) -> list[bytes]:
        """Remove the oldest segments until the bound is kept; returns the lost keys."""
        lost: list[bytes] = []
        while self.n_bytes > self._max_bytes and (self._others or self._segments):
            if self._others:
                path, n_bytes = self._others.pop(0)
                self.n_bytes -= n_bytes
                _remove_unowned(path)
            else:
                lost += self._remove_oldest()
        return lost

    def _remove_oldest(self) -> list[bytes]:
        _, segment = self._segments.popitem(last=False)
        with suppress(OSError):
            segment.path.unlink(missing_ok=True)
        self.n_bytes -= segment.n_bytes
        lost = [key for place, key in enumerate(segment.keys) if self._index.get(key) == (segment, place)]
        for key in lost:
            del self._index[key]
        return lost

    def _scan(self) -> None:
        """Index the records of the folder's segments by their headers; the pages themselves are not read."""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            try:
                segment = Segment(path)
                self._scan_segment(segment)
                self._segments[int(path.stem)] = segment
            except (OSError, ValueError):  # unreadable, or of another make
                with suppress(OSError):
                    path.unlink()
        self._segments = OrderedDict(sorted(self._segments.items()))
        for segment in self._segments.values():
            for place, key in enumerate(segment.keys):
                self._index[key] = segment, place

    def _scan_segment(self, segment: Segment) -> None:
        """Fill ``segment`` from its file. A last record that was not written to its end does not count.

        Raises:
            ValueError: it is not a segment of this fingerprint and layout.
            OSError: it cannot be read.
        """
        with _opened(segment.path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            if os.pread(descriptor, self._header_bytes, 0) != self._header:
                raise ValueError(f"{segment.path}: not a segment of this cache")
            count = (os.fstat(descriptor).st_size - self._header_bytes) // self.record_bytes
            segment.n_bytes = self._header_bytes + count * self.record_bytes
            starts = range(self._header_bytes, segment.n_bytes, self.record_bytes)
            segment.keys += [os.pread(descriptor, KEY_BYTES, start) for start in starts]


def _fields(key: bytes, payload: memoryview) -> bytes:
    """The beginning of a record."""
    return key + xxhash.xxh3_64_digest(payload)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of the file at ``path``, which is this user's alone if it is new."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_private(folder: Path) -> None:
    """Raise PermissionError if another user could read or replace the pages in ``folder``."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: must belong to this user alone, with mode 0700")


def _locked(folder: Path) -> int:
    """The descriptor of the folder's lock, which ends with the process; BlockingIOError: another process has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _other_segments(folder: Path, own: Path) -> list[tuple[Path, int]]:
    """Segments of other fingerprints with their bytes, oldest first, without those that a process owns.

    ``folder`` may hold folders and files of others, which are left alone.
    """
    found = []
    for other in folder.iterdir():
        if other == own or not _FINGERPRINT.fullmatch(other.name) or not other.is_dir():
            continue
        with suppress(OSError):
            os.close(_locked(other))
            found += [(path, path.stat()) for path in other.glob(f"*{_SUFFIX}") if _is_segment(path)]
    return [(path, stat.st_size) for path, stat in sorted(found, key=lambda each: each[1].st_mtime)]


def _is_segment(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAKE)) == _MAKE


def _remove_unowned(path: Path) -> None:
    """Remove a file of another fingerprint unless a process owns it by now."""
    with suppress(OSError):
        descriptor = _locked(path.parent)
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
