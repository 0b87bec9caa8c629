"""Envoy as a process, with a script in its place: what was left behind, signals of the terminal, and its log."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster import envoy_process
from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet
from cluster.state_folder import bound_log
from tests.cluster.envoy_fleet import cluster_config
from tests.cluster.scripted_envoy import program


def process(folder: Path, says: int = 0) -> EnvoyProcess:
    config = cluster_config()
    return EnvoyProcess(config, Fleet.of(config), folder / "envoy", program(folder, says))


async def test_one_that_was_left_behind_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = process(tmp_path)
    await first._spawn()  # and nobody watches over it any more
    async with process(tmp_path) as second:
        assert first._process is not None
        assert await asyncio.wait_for(first._process.wait(), 10) < 0
        assert psutil.pid_exists(second.pid)
    assert f"ending Envoy (process {first.pid})" in caplog.text
    assert not (tmp_path / "envoy" / "envoy.pid").exists()


async def test_who_has_its_number_by_now_is_left_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as other:
        envoy = process(tmp_path)
        (tmp_path / "envoy" / "envoy.pid").write_text(str(other.pid))
        async with envoy:
            assert other.poll() is None
        other.kill()


async def test_a_signal_to_the_terminals_processes_does_not_reach_it(tmp_path: Path) -> None:
    async with process(tmp_path) as envoy:
        assert os.getsid(envoy.pid) == envoy.pid


async def test_its_log_is_bounded_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envoy_process, "_LOG_LOOK_S", 0.01)
    monkeypatch.setattr(envoy_process, "bound_log", lambda path: bound_log(path, 1000))
    log = tmp_path / "envoy" / "envoy.log"
    async with process(tmp_path, says=5000):
        while not (tmp_path / "envoy" / "envoy.log.1").exists() or log.stat().st_size:
            await asyncio.sleep(0.01)
    assert (tmp_path / "envoy" / "envoy.log.1").stat().st_size == 5001
