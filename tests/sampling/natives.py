"""The sampling kernels under test: the native ones (a skip where no compiler is at hand) and broken builds of them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from verify_kernels.cpu.library import FLAGS, SOURCES, load_library
from verify_kernels.cpu.sampling import NativeSampling

CACHE = Path("~/.cache/specdec")


def native_sampling() -> NativeSampling:
    """The native sampler as it is served; skips the test when no C++ compiler is installed."""
    _need_compiler()
    return NativeSampling(load_library(CACHE))


def broken_native(folder: Path, file: str, right: str, wrong: str) -> NativeSampling:
    """The native sampler with ``right`` in ``file`` replaced by ``wrong``, compiled into ``folder``."""
    _copy_sources(folder)
    text = (folder / file).read_text()
    assert text.count(right) == 1, f"{file} no longer holds {right!r} once: bring the mutant up to date"
    (folder / file).write_text(text.replace(right, wrong))
    return _build(folder, ["-O1", *FLAGS[1:]])  # quick to compile, and of the same bits: no flag lets rounding change


def portable_native(folder: Path) -> NativeSampling:
    """The native sampler for any processor of this architecture, with none of this one's vector instructions."""
    _copy_sources(folder)
    return _build(folder, [flag for flag in FLAGS if not flag.startswith("-march")])


def _copy_sources(folder: Path) -> None:
    _need_compiler()
    for source in SOURCES.iterdir():
        if source.name.startswith(("sampling", "philox", "parallel")):
            shutil.copy(source, folder / source.name)


def _build(folder: Path, flags: list[str]) -> NativeSampling:
    library = folder / "sampling.so"
    sources = [str(path) for path in sorted(folder.glob("*.cpp"))]
    subprocess.run(["g++", *flags, "-o", str(library), *sources], check=True, timeout=120)
    return NativeSampling(ctypes.CDLL(str(library)))


def _need_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: the native kernels can not be built")
