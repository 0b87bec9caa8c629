"""Native kernels under test: the served library, or another build. Skips without a compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from verify_kernels.cpu.library import FLAGS, SIGNATURES, SOURCES, cpu_flags, load_library, open_library
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


def backend_for(processor: str) -> NativeBackend:
    """The same kernels compiled for another ``processor`` (a value of -march) than this one."""
    need_compiler()
    return NativeBackend(compile_library(SOURCES, processor), 2)


def compile_library(sources: Path, processor: str | None = "native") -> ctypes.CDLL:
    """The kernels of ``sources``, see `compile_sources`."""
    return open_library(compile_sources(sources, processor), ctypes.CDLL, SIGNATURES)


def compile_sources(sources: Path, processor: str | None = "native") -> Path:
    """Compile all ``sources`` into one library, once per machine and state of the sources, by the served flags except
    -O1, which compiles fast and gives the same bits (no flag lets rounding change); returns its path. ``processor``
    None: any of this architecture."""
    march = [] if processor is None else [f"-march={processor}"]
    flags = ["-O1", *march, *(flag for flag in FLAGS if not flag.startswith(("-O", "-march")))]
    files = [str(path) for path in sorted(sources.glob("*.cpp"))]
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(compiler + "\0".join((cpu_flags(), *flags)).encode())
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    library = CACHE / "kernels" / f"test-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            subprocess.run(["g++", *flags, "-o", f"{scratch}/kernels.so", *files], check=True, timeout=280)
            os.replace(f"{scratch}/kernels.so", library)
    return library
