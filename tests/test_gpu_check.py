"""The command behind `make gpu`: it refuses where it can not run, what pytest says is read right even when it is cut
off, and nothing outlasts its time."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import gpu_check, gpu_ready, gpu_suite, gpu_wheels
from tools.code_map import REPOSITORY
from tools.gpu_suite import outcomes, run_suite

TESTS = """
import pytest, time
def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="a planted reason")
def test_skipped(): pass
@pytest.mark.parametrize("x", ["a b"])
def test_slow(x): time.sleep(float({seconds}))
"""
SERIAL, PARALLEL = ["-p", "no:xdist"], ["-n", "2", "--dist", "worksteal"]


def planted(folder: Path, seconds: float) -> list[str]:
    (folder / "test_planted.py").write_text(TESTS.format(seconds=seconds))
    return [str(folder / "test_planted.py"), "-c", "/dev/null", "--rootdir", str(folder)]


@pytest.mark.parametrize("how", [SERIAL, PARALLEL], ids=["serial", "parallel"])
def test_outcomes_are_counted(how: list[str], tmp_path: Path) -> None:
    log = tmp_path / "tests.log"
    found = run_suite([*how, *planted(tmp_path, 0)], 60, log)
    assert (found["code"], found["passed"], found["skipped"], found["failed"]) == (1, 2, 1, 1)
    (failed,) = found["failed_tests"]
    assert failed.endswith("test_planted.py::test_bad")
    assert found["unfinished"] == []
    assert "one is not two" in log.read_text()


@pytest.mark.parametrize("how", [SERIAL, PARALLEL], ids=["serial", "parallel"])
@pytest.mark.parametrize("given", [signal.SIG_IGN, signal.default_int_handler], ids=["ignoring", "not ignoring"])
def test_a_suite_that_takes_too_long_is_stopped_and_tells(how: list[str], given: Any, tmp_path: Path) -> None:
    """Also where this process ignores interrupts, as one that a shell runs in the background does."""
    log, before = tmp_path / "tests.log", signal.signal(signal.SIGINT, given)
    try:
        found = run_suite([*how, *planted(tmp_path, 60)], 6.0, log)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found["code"], found["passed"], found["skipped"], found["failed"]) == (124, 1, 1, 1)
    assert found["seconds"] < 6 + gpu_suite.GRACE + 10
    assert [name.partition("::")[2] for name in found["unfinished"]] == ["test_slow[a b]"]
    assert "one is not two" in log.read_text()


def test_a_log_that_breaks_off_counts() -> None:
    text = """
tests/a.py::test_one
tests/a.py::test_two[x y]
[gw0] [  1%] PASSED tests/a.py::test_one
[gw11] [100%] FAILED tests/a.py::test_two[x y]
tests/a.py::test_three
tests/a.py::test_four SKIPPED (no such thing) [ 50%]
tests/a.py::test_five PASSED [ 60%]
tests/a.py::test_five ERROR [ 60%]
tests/a.py::test_si"""
    assert outcomes(text) == {
        "passed": 1, "failed": 1, "skipped": 1, "errors": 1,
        "failed_tests": ["tests/a.py::test_five", "tests/a.py::test_two[x y]"],
        "unfinished": ["tests/a.py::test_three", "tests/a.py::test_si"],
    }  # fmt: skip


def test_a_file_that_does_not_import_is_an_error() -> None:
    text = "ERROR tests/b.py - ImportError: no\nFAILED tests/a.py::test_x - assert 1 == 2\n"
    assert outcomes(text)["failed_tests"] == ["tests/a.py::test_x", "tests/b.py"]


def test_the_selection_names_what_exists() -> None:
    options = gpu_suite.suite_options()
    paths = [option.partition("=")[2] or option for option in options if "tests/" in option]
    assert len(paths) == 5
    for path in paths:
        file, _, name = path.partition("::")
        assert (REPOSITORY / file).exists()
        assert not name or f"def {name}(" in (REPOSITORY / file).read_text()


@pytest.mark.parametrize(("suite", "bench", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 1)])
def test_the_exit_code_tells(
    suite: int, bench: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=bench)

    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check, "run_suite", lambda options, seconds, log: {"code": suite})
    assert gpu_check.main([str(tmp_path / "out"), "--commit", "abc"]) == code
    assert json.loads((tmp_path / "out" / "tests.json").read_text()) == {"commit": "abc", "tests": {"code": suite}}
    (command,) = commands
    assert gpu_check.LEAST <= float(command[command.index("--seconds") + 1]) < gpu_check.SECONDS
    assert command[-2:] == ["--commit", "abc"]


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
    tests = gpu_check.TESTS_UNTIL + gpu_suite.GRACE
    assert tests + 200 + gpu_check.SLACK < gpu_check.SECONDS < 540


def test_a_folder_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    assert ended.value.code == 2
    assert "FOLDER" in capsys.readouterr().err


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "refusal", lambda: "torch finds no GPU")
    assert gpu_check.main([str(tmp_path / "out")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named() -> None:
    said = gpu_ready.refusal(("json", "no_such_module.part"))
    assert said is not None
    assert "no_such_module is missing" in said
    assert "make gpu-wheels" in said
    assert "no attribute" in str(gpu_ready.refusal(("json; json.no_such_thing",)))
    alone = gpu_ready.refusal(("json",))
    assert alone is None if torch.cuda.is_available() else "no GPU" in str(alone)


def test_wheels_are_of_the_versions_pinned() -> None:
    names = [pin.partition("==")[0] for pin in gpu_wheels.pinned((REPOSITORY / "requirements.lock").read_text())]
    assert tuple(names) == gpu_wheels.PACKAGES
    with pytest.raises(KeyError, match="gguf"):
        gpu_wheels.pinned("annotated_types==1\n")
