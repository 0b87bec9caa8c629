"""What this machine's memory delivers to a reading loop."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from pathlib import Path

import torch

from verify_kernels.cpu.library import load_library

SIZE = 1 << 30


class BandwidthProbe:
    """Reads 1 GiB of random bytes on huge pages, as the weights lie, with all threads."""

    def __init__(self, cache_dir: Path, threads: int) -> None:
        self._library = load_library(cache_dir)
        self._library.sd_read_bandwidth.restype = ctypes.c_uint64
        self._threads = threads
        self._memory = mmap.mmap(-1, SIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._data = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._data.random_(0, 255)

    def measure(self, repeats: int = 3) -> float:
        """Bytes per second, the best of ``repeats``: noise only ever slows a read."""
        return max(self._once() for _ in range(repeats))

    def median(self, repeats: int = 5) -> float:
        """Bytes per second, the median of ``repeats``."""
        return statistics.median(self._once() for _ in range(repeats))

    def _once(self) -> float:
        began = time.perf_counter()
        self._library.sd_read_bandwidth(
            ctypes.c_void_p(self._data.data_ptr()), ctypes.c_int64(SIZE), ctypes.c_int32(self._threads)
        )
        return SIZE / (time.perf_counter() - began)
