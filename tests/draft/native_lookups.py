"""The native part of lookup drafters under test: as it is served, or changed. Skips without a compiler."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from draft.lookups import SIGNATURES, SOURCES, load_lookups
from tests.kernels.natives import CACHE, compile_sources, need_compiler
from verify_kernels.cpu.library import open_library


def lookups() -> ctypes.PyDLL:
    """The library as it is served."""
    need_compiler()
    return load_lookups(CACHE)


def changed_lookups(folder: Path, file: str, *changes: tuple[str, str]) -> ctypes.PyDLL:
    """The library with each first text of ``changes`` in ``file`` replaced by the second; the sources go to
    ``folder``."""
    need_compiler()
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    text = (folder / file).read_text()
    for right, wrong in changes:
        assert text.count(right) == 1, f"{file} no longer holds {right!r} once: bring the change up to date"
        text = text.replace(right, wrong)
    (folder / file).write_text(text)
    return open_library(compile_sources(folder), ctypes.PyDLL, SIGNATURES)
