"""Native kernels under test: the served library, or a fresh build. Skips without a compiler."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from verify_kernels.cpu.library import FLAGS, SOURCES, load_library, open_library
from verify_kernels.cpu.native_backend import NativeBackend

CACHE = Path("~/.cache/specdec").expanduser()


def need_compiler() -> None:
    """Skips the test when no C++ compiler is installed."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the native kernels cannot be built")


def native_backend(threads: int = 2) -> NativeBackend:
    """A fresh native backend."""
    need_compiler()
    return NativeBackend(load_library(CACHE), threads)


def backend_for(processor: str, folder: Path) -> NativeBackend:
    """The same kernels compiled for another ``processor`` (a value of -march) than this one, into ``folder``."""
    need_compiler()
    return NativeBackend(compile_library(SOURCES, folder / f"{processor}.so", processor), 2)


def compile_library(sources: Path, library: Path, processor: str | None = "native") -> ctypes.CDLL:
    """Compile all ``sources`` into one ``library``, by the served flags except -O1, which compiles fast and gives the
    same bits (no flag lets rounding change). ``processor`` None: any of this architecture."""
    march = [] if processor is None else [f"-march={processor}"]
    flags = ["-O1", *march, *(flag for flag in FLAGS if not flag.startswith(("-O", "-march")))]
    files = [str(path) for path in sorted(sources.glob("*.cpp"))]
    subprocess.run(["g++", *flags, "-o", str(library), *files], check=True, timeout=120)
    return open_library(library)
