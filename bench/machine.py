"""Describes the machine of a figure, its memory bandwidth and the commit."""

from __future__ import annotations

import ctypes
import datetime
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdec.control_groups import usable_cores
from specdec.core.types import EngineInfo
from specdec.errors import KernelError
from verify_kernels.backend import allocate
from verify_kernels.cpu.library import load_library

if TYPE_CHECKING:  # a kernel's benchmark needs no configuration, nor what that imports
    from specdec.config import EngineConfig

SIZE = 1 << 30  # bytes that one measurement reads


class BandwidthProbe:
    """Reads 1 GiB of random bytes with all threads, on huge pages as the weights use them."""

    def __init__(self, cache_dir: Path, threads: int) -> None:
        self._library = load_library(cache_dir)
        self._library.sd_read_bandwidth.restype = ctypes.c_uint64
        self._threads = threads
        self._data = torch.frombuffer(allocate(SIZE), dtype=torch.uint8)
        self._data.random_(0, 255)

    def once(self) -> float:
        """Bytes per second of one read."""
        began = time.perf_counter()
        self._library.sd_read_bandwidth(
            ctypes.c_void_p(self._data.data_ptr()), ctypes.c_int64(SIZE), ctypes.c_int32(self._threads)
        )
        return SIZE / (time.perf_counter() - began)


def host_facts() -> dict[str, Any]:
    """Processor, cores this process may use, Python, the time now (ISO 8601), and the code's commit."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }


def read_bandwidth_gb_s(cache_dir: Path, threads: int) -> float | None:
    """GB/s at which memory is read; None without native kernels, which measure it."""
    try:
        probe = BandwidthProbe(cache_dir, threads)
        return round(statistics.median(probe.once() for _ in range(5)) / 1e9, 2)
    except KernelError:
        return None


_FACTS = ("threads", "version", "target", "draft", "dtype", "kv_dtype", "kernels", "numeric_mode")  # of `EngineInfo`


def engine_facts(config: EngineConfig, info: EngineInfo) -> dict[str, Any]:
    """`host_facts`, the read bandwidth of memory (GB/s; None with the reference kernels) and the engine's settings."""
    native = info.kernels == "native"
    return {
        **host_facts(),
        "read_bandwidth_gb_s": read_bandwidth_gb_s(config.cache_dir, info.threads) if native else None,
        **{name: getattr(info, name) for name in _FACTS},
        "drafters": list(info.drafters),
        "speculation": config.speculation.model_dump(mode="json"),
    }


def cpu_model() -> str:
    """The model name of the processor, or its architecture if the system does not report a name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit this code is from, with `+` when files differ from it; None outside a git checkout."""
    try:
        found = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
