"""Builds the native kernels once per machine and source state, and loads them."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, TypeVar

from specdec.child_python import watched
from specdec.control_groups import usable_cores
from specdec.errors import KernelError

Library = TypeVar("Library", bound=ctypes.CDLL)
Signatures = Mapping[str, tuple[Any, ...]]
"""By function: its result, None or a type of ctypes, and those of its arguments."""
SOURCES = Path(__file__).parent / "csrc"
# -ffp-contract=off: a multiply and an add fuse only where the source says so, so the vector and the scalar
# paths round alike and a result does not depend on how the compiler laid out a loop.
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-w",
    "-fPIC",
    "-shared",
)
BUILD_TIMEOUT_S = 300

_LOGITS = (c_void_p, c_int64, c_int, c_int, c_int)  # pointer, row stride, rows, vocabulary, threads
# Results and argument types of the functions that are not called through a bound record
SIGNATURES = {
    "sd_sample_rows": (None, *_LOGITS, c_void_p, c_void_p, c_void_p),
    "sd_sample_children": (None, *_LOGITS, c_void_p, c_void_p, c_int, c_void_p, c_void_p),
    "sd_sample_logprobs": (None, *_LOGITS, c_void_p, c_int, c_void_p, c_void_p, c_void_p),
    "sd_round_blocks": (None, c_int, c_int, c_void_p, c_int64, c_void_p, c_int, c_void_p),
    "sd_embed_blocks": (None, c_int, c_void_p, c_int, c_int, c_void_p, c_int, c_float, c_void_p),
}


@functools.cache
def load_library(cache_dir: Path) -> ctypes.CDLL:
    """The compiled kernels, built into ``cache_dir/kernels`` when this machine has none for these sources.

    Raises:
        KernelError: no C++ compiler, the compiler failed, the library does not load, or ``cache_dir`` cannot be
            written.
    """
    return load_built(cache_dir, SOURCES, ctypes.CDLL, SIGNATURES)


def load_built(cache_dir: Path, sources: Path, kind: type[Library], signatures: Signatures) -> Library:
    """The library that is built of ``sources``, see `open_library`. Raises as `load_library`."""
    path = build_library(cache_dir, sources)
    try:
        return open_library(path, kind, signatures)
    except OSError as error:
        raise KernelError(
            f"native kernels {path} do not load: {error}; delete the file to rebuild it, or set engine.cache_dir to a "
            "folder from which programs may run"
        ) from None


def open_library(path: Path, kind: type[Library], signatures: Signatures) -> Library:
    """The library at ``path``, with the types declared of those functions in ``signatures`` that it has; raises
    OSError."""
    library = kind(str(path))
    for name, (result, *arguments) in signatures.items():
        if (function := getattr(library, name, None)) is not None:
            function.restype, function.argtypes = result, arguments
    return library


def build_library(cache_dir: Path, sources: Path = SOURCES) -> Path:
    """Compile ``sources`` for this very processor unless that was done before; returns the shared library's path.

    Raises:
        KernelError: no C++ compiler, the compiler failed, or ``cache_dir`` cannot be written.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("no C++ compiler (g++) found; install one")
    folder = cache_dir / "kernels"
    target = folder / f"specdec-{_fingerprint(compiler, sources)}.so"
    try:
        if _is_whole(target):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes starting at once: the second finds the first one's build
            if not _is_whole(target):
                _compile(compiler, sources, folder, target)
    except OSError as error:
        raise KernelError(
            f"native kernels cannot be built in {folder} ({error.strerror or error}); set engine.cache_dir to a "
            "folder that this user may write"
        ) from None
    return target


def _is_whole(library: Path) -> bool:
    """Whether a library is there to its end, the section headers. Loading one that was cut off, as by a copy of the
    cache folder to a full disk, would end this process by a signal."""
    with contextlib.suppress(FileNotFoundError, struct.error), library.open("rb") as file:
        begin, size, count = struct.unpack("<40xQ10x2H2x", file.read(64))  # of an ELF64 header
        return bool(begin + size * count <= library.stat().st_size)
    return False


def _compile(compiler: str, sources: Path, folder: Path, target: Path) -> None:
    """One compiler per source file, as many at once as there are cores: the first start of all waits for it."""
    files = sorted(sources.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        objects = [f"{scratch}/{path.stem}.o" for path in files]
        with ThreadPoolExecutor(usable_cores()) as pool:
            each = zip(objects, files, strict=True)
            runs = [pool.submit(_run, scratch, [compiler, *FLAGS, "-c", "-o", out, str(path)]) for out, path in each]
            for run in runs:
                run.result()
        _run(scratch, [compiler, *FLAGS, "-o", f"{scratch}/kernels.so", *objects])
        os.replace(f"{scratch}/kernels.so", target)


def _run(scratch: str, command: list[str]) -> None:
    """Run a compiler command, which ends with this process.

    Raises:
        KernelError: the command failed or took longer than `BUILD_TIMEOUT_S`.
    """
    environment = {**os.environ, "TMPDIR": scratch}  # a container may have no other folder to write to
    try:
        with watched(
            command, scratch, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            _, errors = process.communicate(timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise KernelError(f"compiling the native kernels took over {BUILD_TIMEOUT_S} s") from None
    if process.returncode != 0:
        raise KernelError(f"compiling the native kernels failed:\n{errors[-2000:]}")


def _fingerprint(compiler: str, sources: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest.update("\0".join((version, platform.machine(), cpu_flags(), *FLAGS)).encode())
    return digest.hexdigest()[:16]


def cpu_flags() -> str:
    """The processor's instruction sets: a cache folder may be shared by machines that differ in them."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
