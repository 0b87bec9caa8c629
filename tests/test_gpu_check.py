"""The command behind `make gpu`: what pytest says is read right, and nothing outlasts its time."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import gpu_check

TESTS = """
import pytest, time
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): pass
def test_slow(): time.sleep(float({seconds}))
"""


def test_outcomes_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(TESTS.format(seconds=0))
    found = gpu_check.run_suite([str(file), "-c", "/dev/null", "--rootdir", str(tmp_path)], 60)
    assert (found["code"], found["passed"], found["skipped"]) == (1, 2, 1)
    (failed,) = found["failed"]
    assert failed.endswith("test_planted.py::test_bad")


def test_a_suite_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(TESTS.format(seconds=60))
    monkeypatch.setattr(gpu_check, "LEAST", 3.0)
    found = gpu_check.run_suite([str(file), "-c", "/dev/null", "--rootdir", str(tmp_path)], 3.0)
    assert found["code"] == 124
    assert found["seconds"] < 20


@pytest.mark.parametrize(("suite", "bench", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 1)])
def test_the_exit_code_tells(
    suite: int, bench: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=bench)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check, "run_suite", lambda options, seconds: {"code": suite})
    assert gpu_check.main([str(tmp_path / "out")]) == code
    assert json.loads((tmp_path / "out" / "tests.json").read_text())["kernels"] == {"code": suite}
    (command,) = commands
    assert gpu_check.LEAST <= float(command[-1]) < gpu_check.SECONDS


def test_benches_that_take_too_long_are_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def run(command: list[str], timeout: float, **_: Any) -> SimpleNamespace:
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check.run_benches(tmp_path / "kernels.json", 200.0) == 124
    assert limits == [200.0]
    assert "stopped" in capsys.readouterr().out


def test_parts_fit_nine_minutes() -> None:
    ends = list(gpu_check.UNTIL.values())
    assert list(gpu_check.UNTIL) == list(gpu_check.SUITES)
    assert ends == sorted(ends)
    assert ends[-1] + 2 * gpu_check.SLACK < gpu_check.SECONDS < 540


def test_a_folder_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "FOLDER" in capsys.readouterr().err
