"""A process that is ended while kernels compile leaves neither compilers nor files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verify_kernels.cpu.library import build_library

COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit
sleep 300 &
echo $$ >> {pids}
echo $! >> {pids}
wait
"""
BUILD = """
import pathlib, sys
from verify_kernels.cpu.library import build_library
build_library(pathlib.Path(sys.argv[1]))
"""


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_file(number: signal.Signals, tmp_path: Path) -> None:
    pids, folder = tmp_path / "pids", tmp_path / "bin"
    folder.mkdir()
    (folder / "g++").write_text(COMPILER.format(pids=pids))
    (folder / "g++").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(tmp_path / "cache")], env=environment)
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) >= 2)
    assert list((tmp_path / "cache" / "kernels").glob("tmp*"))
    process.send_signal(number)
    process.wait()
    wait_for(lambda: not any(runs(int(pid)) for pid in pids.read_text().split()))
    wait_for(lambda: not list((tmp_path / "cache" / "kernels").glob("tmp*")))


def test_a_library_that_was_cut_off_is_built_again(tmp_path: Path) -> None:
    """Loading one ends the process by SIGBUS."""
    cache, sources = tmp_path / "cache", tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }')
    built = build_library(cache, sources)
    whole, inode = built.read_bytes(), built.stat().st_ino
    assert build_library(cache, sources).stat().st_ino == inode
    for size in (len(whole) - 1, len(whole) // 2, 10, 0):
        built.write_bytes(whole[:size])
        assert build_library(cache, sources) == built
        assert len(built.read_bytes()) == len(whole)
