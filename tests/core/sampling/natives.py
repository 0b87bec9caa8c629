"""The sampling kernels under test: the native ones (skipped without a compiler) and broken builds of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.kernels.natives import CACHE, compile_library, need_compiler
from verify_kernels.cpu.library import SOURCES, load_library
from verify_kernels.cpu.native_backend import NativeSampling


def native_sampling(threads: int = 1) -> NativeSampling:
    """The native sampler as it is served."""
    need_compiler()
    return NativeSampling(load_library(CACHE), threads)


def broken_native(folder: Path, file: str, right: str, wrong: str) -> NativeSampling:
    """The native sampler with ``right`` in ``file`` replaced by ``wrong``; the sources go to ``folder``."""
    _copy_sources(folder)
    text = (folder / file).read_text()
    assert text.count(right) == 1, f"{file} no longer holds {right!r} once: bring the mutant up to date"
    (folder / file).write_text(text.replace(right, wrong))
    return NativeSampling(compile_library(folder), 1)


def portable_native(folder: Path) -> NativeSampling:
    """The native sampler for any processor of this architecture, with none of this one's vector instructions."""
    _copy_sources(folder)
    return NativeSampling(compile_library(folder, None), 1)


def _copy_sources(folder: Path) -> None:
    need_compiler()
    for source in SOURCES.iterdir():
        if source.name.startswith(("sampling", "philox", "parallel")):
            shutil.copy(source, folder / source.name)
