"""Trace files: complete when the process is killed, never overwritten, bounded, and still one run to a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.control.trace import KEPT_FILES, TraceWriter, read_trace, replay_file
from specdec.core.types import StepTrace
from specdec.errors import ConfigError
from tests.control.test_replay import recorded


@pytest.fixture
def run(tmp_path: Path) -> tuple[dict[str, object], list[StepTrace]]:
    """The inputs of a controller, and the steps of a run."""
    path = tmp_path / "recorded"
    path.write_text(recorded()[0])
    controller, steps = read_trace(path)
    return controller, list(steps)


Run = tuple[dict[str, object], list[StepTrace]]


def test_a_killed_process_loses_no_step(run: Run, tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl", run[0])
    for i, step in enumerate(run[1][:3], 1):
        writer.write(step)
        assert len(list(read_trace(tmp_path / "t.jsonl")[1])) == i  # though it was not closed
    writer.close()


def test_a_restart_keeps_earlier_files(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for i in range(KEPT_FILES + 2):
        writer = TraceWriter(path, run[0])
        writer.write(run[1][i])
        writer.close()
    found = [path, *(tmp_path / f"t.jsonl.{number}" for number in range(1, KEPT_FILES + 1))]
    assert [[step.step for step in read_trace(one)[1]] for one in found] == [[4], [3], [2], [1]]
    assert len(list(tmp_path.glob("t.jsonl*"))) == KEPT_FILES + 1


def test_only_the_owner_may_read_the_callers_tokens(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for _ in range(2):
        writer = TraceWriter(path, run[0])
        writer.write(run[1][0])
        writer.close()
    assert [file.stat().st_mode & 0o777 for file in tmp_path.glob("t.jsonl*")] == [0o600, 0o600]


def test_starts_without_a_step_keep_earlier_steps(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for steps in (run[1][:2], *([[]] * (KEPT_FILES + 1)), run[1][2:3]):
        writer = TraceWriter(path, run[0])
        for step in steps:
            writer.write(step)
        writer.close()
    found = [path, tmp_path / "t.jsonl.1"]
    assert sorted(tmp_path.glob("t.jsonl*")) == found
    assert [[step.step for step in read_trace(one)[1]] for one in found] == [[2], [0, 1]]


@pytest.mark.parametrize("text", ["one line\n", '{"a": 1}\n', "part"])
def test_a_file_that_is_no_trace_is_kept(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    writer = TraceWriter(path, run[0])
    assert path.read_text() == text
    writer.write(run[1][0])
    writer.close()
    assert (tmp_path / "t.jsonl.1").read_text() == text


def test_a_run_in_several_files_is_replayed_whole(run: Run, tmp_path: Path) -> None:
    path, size = tmp_path / "t.jsonl", len(recorded()[0])
    writer = TraceWriter(path, run[0], size // KEPT_FILES)
    for step in run[1]:
        writer.write(step)
    writer.close()
    files = sorted(tmp_path.glob("t.jsonl*"))
    assert len(files) in (KEPT_FILES, KEPT_FILES + 1)
    assert sum(file.stat().st_size for file in files) > size
    (tmp_path / "whole").write_text(recorded()[0])
    whole, report = replay_file(tmp_path / "whole"), replay_file(path)
    assert (report.differences, report.steps) == ([], whole.steps)
    assert 0 < replay_file(tmp_path / "t.jsonl.1").steps <= whole.steps  # up to there
    files[-1].unlink()
    with pytest.raises(ConfigError, match="was deleted; only the last 3 are kept"):
        replay_file(path)
    assert [json.loads(file.read_text().splitlines()[0])["continues"] for file in files[:-1]] == [True] * (
        len(files) - 1
    )


def test_a_number_in_a_name_is_not_part_of_another_trace(run: Run, tmp_path: Path) -> None:
    """A separate trace, though its name is that of an older part of a missing one."""
    path, size = tmp_path / "run.1", len(recorded()[0])
    (tmp_path / "run").write_text("no trace")
    writer = TraceWriter(path, run[0], size // KEPT_FILES)
    for step in run[1]:
        writer.write(step)
    writer.close()
    (tmp_path / "whole").write_text(recorded()[0])
    assert replay_file(path).steps == replay_file(tmp_path / "whole").steps
