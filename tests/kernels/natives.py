"""One native backend per thread count, or a skip where no compiler is at hand."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from verify_kernels.cpu.library import FLAGS, SOURCES
from verify_kernels.cpu.native_backend import NativeBackend

CACHE = Path("~/.cache/specdec")


def native_backend(threads: int = 2) -> NativeBackend:
    """A fresh native backend; skips the test when no C++ compiler is installed."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the native kernels can not be built")
    return NativeBackend(CACHE, threads)


def backend_for(processor: str, folder: Path) -> NativeBackend:
    """The same kernels compiled for another ``processor`` (a value of -march) than this one, into ``folder``."""
    backend = native_backend()
    library = folder / f"{processor}.so"
    flags = ["-O1", f"-march={processor}", *(f for f in FLAGS if not f.startswith(("-O", "-march")))]
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    subprocess.run(["g++", *flags, "-o", str(library), *sources], check=True, timeout=120)
    backend._library = ctypes.CDLL(str(library))
    return backend
