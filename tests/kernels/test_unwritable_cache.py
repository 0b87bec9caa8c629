"""A cache folder that cannot be used: the start says so in one line, or goes on with slow kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.errors import KernelError
from tests.kernels.natives import need_compiler
from verify_kernels.backend_selection import load_kernels
from verify_kernels.cpu import library


@pytest.mark.parametrize("in_the_way", ["cache", "cache/kernels", "cache/kernels/build.lock/x"])
def test_kernels_of_an_unwritable_cache(in_the_way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files where folders belong and the other way round, since root may write anywhere."""
    need_compiler()
    blocked = tmp_path / in_the_way
    blocked.parent.mkdir(parents=True, exist_ok=True)
    blocked.touch()
    folder = tmp_path / "cache"
    with pytest.raises(KernelError, match=rf"built in {folder}/kernels \(.*; set engine\.cache_dir to") as caught:
        load_kernels("native", folder, 1)
    assert "\n" not in str(caught.value)
    assert load_kernels("auto", folder, 1).name == "reference"
    assert "falling back to slow reference ones" in caplog.text


def test_a_cache_folder_is_all_that_a_build_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a read-only root and a volume for the cache, without a /tmp."""
    need_compiler()
    sources, compiler, cache = tmp_path / "csrc", tmp_path / "g++", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n'
        f'case "$TMPDIR" in {cache}/*) exec c++ "$@" ;; *) echo "Cannot create temporary file" >&2; exit 1 ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert library.build_library(cache, sources).is_file()


def test_kernels_that_do_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, or in a folder that is mounted `noexec`, where building them again would not help."""
    damaged = tmp_path / "kernels.so"
    damaged.touch()
    monkeypatch.setattr(library, "build_library", lambda *_: damaged)
    with pytest.raises(KernelError, match=r"delete the file to rebuild it, or set engine\.cache_dir to"):
        load_kernels("native", tmp_path, 1)
