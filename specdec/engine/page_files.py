"""Pages of the prefix cache in files: one file per page, in a bounded folder that one process owns."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

_SUFFIX = ".page4"  # raise the number when the layout changes
_FINGERPRINT = re.compile("[0-9a-f]{32}")  # the name of a fingerprint's folder
# Of a page of any layout: its key in hexadecimal digits. Layouts before 4 had files of many pages, by number
_FILE = re.compile(r"[0-9a-f]{32}\.page[0-9]+|[0-9]{10}\.pages")
_DIGEST_BYTES = 8  # of XXH3, 64 bits, before a page's keys and values


class DamagedPageError(Exception):
    """A file's bytes are not those that were written for the page."""


class PageFiles:
    """The pages of one numeric fingerprint: ``folder / fingerprint / KEY.page4``.

    Thread-safe. A page's key stands for its tokens, those before them and the salt; before the page is used, a digest
    of key and content is compared. Nothing is synchronised to the disk: what a crash of the system damages is a
    `DamagedPageError` later.

    payload_bytes: of a page's keys and values. max_bytes: of all pages below ``folder``, those of other fingerprints
    included unless another process owns them. The oldest are removed first, other fingerprints' before all.

    Raises:
        OSError: the folder cannot be used; a `BlockingIOError`: another process owns it.
        ValueError: ``max_bytes`` is less than two pages need.
    """

    def __init__(self, folder: Path, fingerprint: str, payload_bytes: int, max_bytes: int) -> None:
        self.record_bytes = _DIGEST_BYTES + payload_bytes
        if max_bytes < 2 * self.record_bytes:
            raise ValueError(f"two pages need {2 * self.record_bytes} bytes on disk, so {max_bytes} are too few")
        self._max_bytes, self._folder = max_bytes, folder / fingerprint
        self._mutex = threading.Lock()
        self._lock = _owned(self._folder)
        try:
            self._keys = self._scan()  # oldest first
            self._others = _other_files(folder, self._folder)
            self._other_bytes = sum(n_bytes for _, n_bytes in self._others)
            self._make_room(())
        except BaseException:
            os.close(self._lock)
            raise

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def n_bytes(self) -> int:
        """Bytes of all pages below the folder."""
        return len(self._keys) * self.record_bytes + self._other_bytes

    @property
    def capacity_pages(self) -> int:
        """Pages that the bound allows."""
        return self._max_bytes // self.record_bytes

    def buffer(self) -> bytearray:
        """A buffer for one file."""
        return bytearray(self.record_bytes)

    @staticmethod
    def payload(buffer: bytearray) -> memoryview:
        """The part of a file that holds the page's keys and values."""
        return memoryview(buffer)[_DIGEST_BYTES:]

    def append(self, key: bytes, buffer: bytearray, in_use: Container[bytes] = ()) -> None:
        """Write the page of ``key``, whose payload is in ``buffer``. in_use: pages that are not removed to make room;
        fewer than the bound allows.

        Raises:
            OSError: it cannot be written.
        """
        buffer[:_DIGEST_BYTES] = _digest(key, self.payload(buffer))
        with self._mutex:
            self._keys.pop(key, None)
            try:
                with _opened(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
                    count = os.pwrite(descriptor, buffer, 0)
                if count != len(buffer):  # a full disk
                    raise OSError(f"{self._path(key)}: only {count} of {len(buffer)} bytes were written")
            except OSError:
                self._remove(key)
                if not self._folder.exists():  # it was removed, and all pages with it
                    self._keys.clear()
                    former, self._lock = self._lock, _owned(self._folder)
                    os.close(former)
                raise
            self._keys[key] = None
            self._make_room(in_use)

    def read(self, key: bytes, buffer: bytearray) -> None:
        """Read the page of ``key`` into ``buffer``.

        Raises:
            KeyError: it is not stored any more.
            DamagedPageError: its file holds something else; it is removed.
            OSError: its file cannot be read; it is removed.
        """
        if key not in self._keys:
            raise KeyError(key)
        try:
            with _opened(self._path(key), os.O_RDONLY) as descriptor:
                count = os.preadv(descriptor, [buffer], 0)
            if count != self.record_bytes or buffer[:_DIGEST_BYTES] != _digest(key, self.payload(buffer)):
                raise DamagedPageError(self._path(key))
        except (OSError, DamagedPageError):
            with self._mutex:
                self._remove(key)
            raise

    def erase(self) -> None:
        """Remove every page of this fingerprint."""
        with self._mutex:
            for key in [*self._keys]:
                self._remove(key)

    def close(self) -> None:
        """Let another process own the folder."""
        with self._mutex:
            os.close(self._lock)

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _remove(self, key: bytes) -> None:
        self._keys.pop(key, None)
        with suppress(OSError):
            self._path(key).unlink()

    def _make_room(self, in_use: Container[bytes]) -> None:
        """Remove the oldest pages until the bound is kept. Pages ``in_use`` count as new."""
        while self._others and self.n_bytes > self._max_bytes:
            path, n_bytes = self._others.pop(0)
            self._other_bytes -= n_bytes
            _remove_unowned(Path(path))
        while self.n_bytes > self._max_bytes:
            oldest = next(iter(self._keys))
            if oldest in in_use:
                self._keys.move_to_end(oldest)
                with suppress(OSError):
                    os.utime(self._path(oldest))  # for the order at the next start
            else:
                self._remove(oldest)

    def _scan(self) -> OrderedDict[bytes, None]:
        """The keys of the folder's files, oldest first; the pages themselves are not read."""
        found = []
        for file in _page_files(self._folder):
            with suppress(OSError):
                state = file.stat(follow_symlinks=False)
                if file.name.endswith(_SUFFIX) and state.st_size == self.record_bytes:
                    found.append((state.st_mtime_ns, bytes.fromhex(file.name.removesuffix(_SUFFIX))))
                else:  # of a former layout, or not written to its end
                    os.unlink(file.path)
        return OrderedDict.fromkeys(key for _, key in sorted(found))


def _digest(key: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_64(key)
    digest.update(payload)
    return digest.digest()


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of the file at ``path``, which is this user's alone if it is new."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _owned(folder: Path) -> int:
    """Make a fingerprint's folder unless it exists; the descriptor of its lock, see `_locked`."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)
    return _locked(folder)


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


def _page_files(folder: Path) -> list[os.DirEntry[str]]:
    """The pages in a fingerprint's folder, which may be 100,000. Other files there are left alone."""
    with os.scandir(folder) as files:
        return [file for file in files if _FILE.fullmatch(file.name)]


def _other_files(folder: Path, own: Path) -> list[tuple[str, int]]:
    """Pages of other fingerprints with their bytes, oldest first, without those that a process owns."""
    found = []
    for other in folder.iterdir():
        if other == own or not _FINGERPRINT.fullmatch(other.name) or not other.is_dir():
            continue
        with suppress(OSError):
            os.close(_locked(other))
            found += [(file.path, file.stat(follow_symlinks=False)) for file in _page_files(other)]
    return [(path, state.st_size) for path, state in sorted(found, key=lambda each: each[1].st_mtime_ns)]


def _remove_unowned(path: Path) -> None:
    """Remove a file of another fingerprint unless a process owns it by now."""
    with suppress(OSError):
        descriptor = _locked(path.parent)
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
