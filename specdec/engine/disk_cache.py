"""The prefix cache's second tier: pages are copied to files beside the steps, and back into pages before admission."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from specdec.config import EngineConfig
from specdec.core.kv_cache import KvCacheManager, PageLoad
from specdec.core.types import EngineInfo, EngineLoad
from specdec.engine.page_files import DamagedPageError, PageFiles
from specdec.models.decoder import Decoder, TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE

logger = logging.getLogger(__name__)

WRITE_SHARE = 0.01
"""Share of the time that the writer works while requests run; it works without a pause while none do."""
DRAIN_S = 3.0
"""Seconds that `DiskCache.close` writes for; a server kills an engine that takes longer than 5 s to close."""
RETRY_S = 30.0
"""Seconds without writing after a write failed, as on a full disk."""
FOLDER = "prefix"
"""Of the pages, in the cache folder."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page in memory. Its content does not change while `DiskCache` holds this very entry."""

    page: int
    key: bytes
    before: bytes | None
    """Key of the page before it in its text; None: it is the first."""
    written: bool
    """Whether it was on disk since the last flush; it stays so when it makes room for others there."""


@dataclass(slots=True, eq=False)
class DiskLoad:
    """Pages that are read for a request."""

    load: PageLoad
    filled: Future[int]
    """How many of the pages, from the first, have been filled."""
    ended: bool = False
    """Whether these are cached now."""


class DiskCache:
    """Follows ``kv`` and copies its full pages to ``files``; fills pages for prompts that these hold.

    One thread writes and one reads; neither holds a lock that a step waits for longer than one page takes. A page on
    disk has the target's keys and values only, so a draft model reads the prompt again.

    memory: `KvTensors.page_bytes` of the target.
    """

    def __init__(self, files: PageFiles, kv: KvCacheManager, memory: Seq[NDArray[np.uint8]]) -> None:
        self._files, self._kv, self._memory = files, kv, memory
        self._cached: dict[bytes, CachedPage] = {}  # by key
        self._pending: SimpleQueue[CachedPage | None] = SimpleQueue()  # to be written; None: the end
        self._loads: list[DiskLoad] = []
        self._written = self._read = 0
        self._missed: Counter[str] = Counter()
        self._erasing = threading.Lock()  # a page is not appended after it was flushed
        self._retry_s = 0.0  # monotonic time until which nothing is written
        # A page is found through those before it, so no page in memory is removed from disk, unless the disk has room
        # for few others
        self._kept: Container[bytes] = kv if kv.n_total * 2 <= files.capacity_pages else ()
        self._idle, self._dropping, self._buffer = threading.Event(), threading.Event(), files.buffer()
        self._idle.set()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="disk-cache-read")
        self._reader.submit(int)  # starts the thread now: a load must not fail because no thread can be started
        self._writer = threading.Thread(target=self._write_pending, name="disk-cache-write", daemon=True)
        self._writer.start()
        kv.follow(self)

    def stored(self, page: int, key: bytes, parent: bytes | None, tokens: Seq[int], salt: str) -> None:
        """Queue a page that entered the cache."""
        entry = self._cached[key] = CachedPage(page, key, parent, key in self._files)
        if not entry.written:
            self._pending.put(entry)

    def removed(self, page: int, key: bytes) -> None:
        """Forget a page that left the cache. One that is not yet written is lost."""
        self._cached.pop(key, None)

    def flushed(self) -> None:
        """Do nothing: `removed` was called for each page."""

    def set_idle(self, idle: bool) -> None:
        """Set whether no request runs."""
        if idle:
            self._idle.set()
        else:
            self._idle.clear()

    def start(self, tokens: Seq[int], salt: str, reserve: int) -> DiskLoad | None:
        """Begin to read the pages of a prompt that are on disk and not in memory; None: there are none.

        If the first of them is being read for another prompt, it returns that load; call it again once that has ended.
        reserve: pages that stay available to running sequences.
        """
        if (begun := self._load_of(tokens, salt)) is not None:
            return begun
        load = self._kv.begin_load(tokens, salt, self._files, reserve)
        if not load.pages:
            self._kv.end_load(load, 0)
            return None
        begun = DiskLoad(load, self._reader.submit(self._fill, load))
        self._loads.append(begun)
        return begun

    def _load_of(self, tokens: Seq[int], salt: str) -> DiskLoad | None:
        """The load that fills the first page of a prompt that is not in memory."""
        if not self._loads:
            return None
        depth = self._kv.cached_tokens(tokens, salt) // PAGE_SIZE
        end = (depth + 1) * PAGE_SIZE
        for begun in self._loads:
            load = begun.load
            if len(load.cached) <= depth < len(load.keys) and load.salt == salt and load.tokens[:end] == tokens[:end]:
                return begun
        return None

    def end_loads(self) -> None:
        """Cache the pages of the loads that are done."""
        for each in [each for each in self._loads if each.filled.done()]:
            self._loads.remove(each)
            n_filled = 0
            try:
                n_filled = 0 if each.filled.cancelled() else each.filled.result()
            except Exception:
                logger.exception("pages could not be read from disk")
            self._kv.end_load(each.load, n_filled)
            self._read += n_filled
            each.ended = True

    def drop_loads(self) -> None:
        """End all loads; waits for the page that is being read."""
        self._dropping.set()
        wait([each.filled for each in self._loads if not each.filled.cancel()])
        self._dropping.clear()
        self.end_loads()

    def erase(self) -> None:
        """Erase all pages on disk. Called after `drop_loads` and after the cache was flushed."""
        with self._erasing:
            self._files.erase()
            for entry in self._cached.values():
                entry.written = False

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """``load`` with the figures of this cache."""
        return replace(
            load,
            disk_bytes=self._files.n_bytes,
            disk_pages_written=self._written,
            disk_pages_read=self._read,
            disk_pages_missed=dict(self._missed),
        )

    def close(self) -> None:
        """Write the pages that are not yet on disk, for up to `DRAIN_S`."""
        self._pending.put(None)
        self._idle.set()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.join(DRAIN_S)
        if self._writer.is_alive():
            logger.warning("disk cache: %d pages were not written within %g s", self._pending.qsize(), DRAIN_S)
            self._cached.clear()  # so that no more are written

    def _write_pending(self) -> None:
        """The writer's thread, which closes the files at the end."""
        while (last := self._pending.get()) is not None:
            for entry in self._unwritten(last):
                began = time.perf_counter()
                self._write(entry)
                self._idle.wait((time.perf_counter() - began) * (1 / WRITE_SHARE - 1))
                if not entry.written:
                    break
        self._files.close()

    def _unwritten(self, entry: CachedPage) -> list[CachedPage]:
        """``entry`` behind those before it in its text through which it is found, so far as a flush or a full disk has
        left them in memory only. ``entry`` alone while nothing is written."""
        chain = [entry]
        if time.monotonic() < self._retry_s:
            return chain
        while (before := self._unwritten_before(chain[-1])) is not None:
            chain.append(before)
        return chain[::-1]

    def _unwritten_before(self, entry: CachedPage) -> CachedPage | None:
        before = None if entry.before is None else self._cached.get(entry.before)
        return None if before is None or before.written else before

    def _write(self, entry: CachedPage) -> None:
        """Write a page; one that leaves the cache before it is copied is lost."""
        if self._cached.get(entry.key) is not entry:
            self._missed["evicted"] += 1
            return
        if time.monotonic() < self._retry_s:
            self._missed["write_error"] += 1
            return
        for in_memory, in_record in self._places(entry.page, self._buffer):
            in_record[:] = in_memory
        with self._erasing:
            if self._cached.get(entry.key) is not entry:  # the copy may be of another content
                self._missed["evicted"] += 1
                return
            if self._unwritten_before(entry) is not None:  # a flush has just erased it; the next page comes with both
                return
            try:
                self._files.append(entry.key, self._buffer, self._kept)
            except OSError as error:
                logger.warning("disk cache: pages are not written for %g s: %s", RETRY_S, error)
                self._retry_s = time.monotonic() + RETRY_S
                self._missed["write_error"] += 1
                for each in [*self._cached.values()]:  # the folder may have been removed
                    each.written = each.key in self._files
                return
            entry.written = True
        self._written += 1

    def _fill(self, load: PageLoad) -> int:
        """Read the pages of ``load`` in order until one cannot be used; returns how many were read."""
        buffer, keys = self._files.buffer(), load.keys[len(load.cached) :]
        for place, page in enumerate(load.pages):
            if self._dropping.is_set():
                return place
            try:
                self._files.read(keys[place], buffer)
            except (KeyError, OSError, DamagedPageError) as error:
                reasons = {KeyError: "removed", DamagedPageError: "damaged"}
                self._missed[reasons.get(type(error), "unreadable")] += 1
                return place
            for in_memory, in_record in self._places(page, buffer):
                in_memory[:] = in_record
        return len(load.pages)

    def _places(self, page: int, buffer: bytearray) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """By tensor, the bytes of ``page`` in memory and in a record's ``buffer``, each [layers, bytes]."""
        start, payload = 0, np.frombuffer(self._files.payload(buffer), np.uint8)
        for tensor in self._memory:
            layers, _, size = tensor.shape
            yield tensor[:, page], payload[start : start + layers * size].reshape(layers, size)
            start += layers * size


def open_disk_cache(
    config: EngineConfig, info: EngineInfo, kv: KvCacheManager, decoder: TargetDecoder
) -> DiskCache | None:
    """The configured disk cache; None: it is off, or cannot be used, which is logged."""
    if not config.kv_disk_bytes or not config.prefix_cache:
        return None
    if not isinstance(decoder, Decoder) or info.pooling:
        logger.info("disk cache: off; only a model that generates text on a CPU has one")
        return None
    folder = config.kv_disk_folder or config.cache_dir / FOLDER
    memory = decoder.pool.tensors.page_bytes()
    payload_bytes = sum(tensor.shape[0] * tensor.shape[2] for tensor in memory)
    try:
        files = PageFiles(folder, info.numeric_fingerprint, payload_bytes, config.kv_disk_bytes)
    except BlockingIOError:
        logger.warning("disk cache: off, since another process uses %s for the same model", folder)
    except (OSError, ValueError) as error:
        logger.warning("disk cache: off: %s", error)
    else:
        logger.info("disk cache: %d pages of %d tokens in %s", len(files), PAGE_SIZE, folder)
        return DiskCache(files, kv, memory)
    return None
