"""The cores that an engine takes by default: CPU limits of control groups count, not only the affinity."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.config import EngineConfig
from specdec.control_groups import usable_cores
from specdec.engine import build
from specdec.errors import ConfigError


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def limit(group: Path, quota: str, version: int) -> None:
    """``quota``: of 100 ms."""
    group.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (group / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("version", "line", "none"), [(2, "0::/slice/unit", "max"), (1, "4:cpu,cpuacct:/slice/unit", "-1")]
)
def test_the_tightest_quota_of_all_enclosing_groups_applies(tmp_path: Path, version: int, line: str, none: str) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    own.write_text(f"9:pids:/elsewhere\n{line}\n")
    root = mount if version == 2 else mount / "cpu"
    assert usable_cores(mount, own) == 8
    limit(root / "slice/unit", none, version)
    assert usable_cores(mount, own) == 8
    limit(root / "slice", "350000", version)
    assert usable_cores(mount, own) == 4
    limit(root / "slice/unit", "10000", version)
    assert usable_cores(mount, own) == 1
    limit(root / "slice/unit", "9900000", version)
    limit(root / "other", "100000", version)
    assert usable_cores(mount, own) == 4


def test_a_host_path_inside_a_container_finds_the_containers_quota(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/not/mounted/here\n")
    limit(tmp_path / "mount", "200000", 2)
    assert usable_cores(tmp_path / "mount", own) == 2
    assert usable_cores(tmp_path / "mount", tmp_path / "missing") == 2


def test_an_engine_takes_no_more_threads_than_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own accord. A number that is set may exceed a limit of CPU time, but not the cores."""

    class LoadedError(Exception):
        """Kernels were asked for, with this number of threads."""

    def load_kernels(name: str, cache_dir: Path, threads: int) -> None:
        raise LoadedError(threads)

    monkeypatch.setattr(build, "usable_cores", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(build, "load_kernels", load_kernels)
    for given, taken in ((0, 1), (2, 2)):
        with pytest.raises(LoadedError, match=str(taken)):
            build.build_parts(EngineConfig(threads=given))
    with pytest.raises(ConfigError, match="3 threads on 2 cores"):
        build.build_parts(EngineConfig(threads=3))
