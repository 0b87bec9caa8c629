"""One native backend per thread count, or a skip where no compiler is at hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from verify_kernels.cpu.native_backend import NativeBackend

CACHE = Path("~/.cache/specdec")


def native_backend(threads: int = 2) -> NativeBackend:
    """A fresh native backend; skips the test when no C++ compiler is installed."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the native kernels can not be built")
    return NativeBackend(CACHE, threads)
