"""The trace on disk and in memory: files round-trip, invalid ones are rejected, memory is bounded."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec.control.trace import TraceLog, TraceWriter, read_trace
from specdec.core.types import DrafterTrace, StepTrace
from specdec.errors import ConfigError

HEADER = '{"specdec_trace":5,"controller":{}}\n'


def step(number: int, **fields: object) -> StepTrace:
    drafters = [DrafterTrace("naïve", "free", 1, 2, 3, 4, 0.5, 0.1)]
    numbers = [0.5, 1, 2, 3, 4.0, 5, 6, 7.5, 8, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    return StepTrace(number, *numbers, drafters=drafters, **fields)  # type: ignore[arg-type, misc]


def write(path: Path, steps: int) -> None:
    writer = TraceWriter(path, {"probe_every": 16})
    for number in range(steps):
        writer.write(step(number, replay={"pending": [1]}))
    writer.close()


def test_a_trace_round_trips(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", 3)
    header, steps = read_trace(tmp_path / "t.jsonl")
    assert header == {"probe_every": 16}
    assert list(steps) == [step(number, replay={"pending": [1]}) for number in range(3)]


def test_steps_without_a_prediction_are_json(tmp_path: Path) -> None:
    log = TraceLog(1, TraceWriter(tmp_path / "t.jsonl", {}))
    plain = step(0, replay={"pending": [1]})
    plain.predicted_verify_ms = math.nan
    log.add(plain)
    log.close()
    line = (tmp_path / "t.jsonl").read_text().splitlines()[1]
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["predicted_verify_ms"], found["replay"]) == (None, {"pending": [1]})
    (back,) = read_trace(tmp_path / "t.jsonl")[1]
    assert math.isnan(back.predicted_verify_ms)


@pytest.mark.parametrize("cut", [1, 2, 40, 150])
def test_a_truncated_last_line_ends_the_trace(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 3)
    path.write_bytes(path.read_bytes()[:-cut])
    _, steps = read_trace(path)
    assert [found.step for found in steps] == ([0, 1, 2] if cut == 1 else [0, 1])


def test_a_last_line_truncated_within_a_character_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(HEADER.encode() + '{"name": "ï'.encode()[:-1])
    assert list(read_trace(path)[1]) == []


def test_a_header_alone_is_an_empty_trace(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(HEADER)
    assert list(read_trace(tmp_path / "t.jsonl")[1]) == []


@pytest.mark.parametrize(
    "header",
    [
        "", "\n", "{", "[]\n", "7\n", '{"specdec_trace":1,"controller":{}}\n', '{"controller":{}}\n',
        '{"specdec_trace":6,"controller":{}}\n',
        "[" * 100_000 + "\n",
        '{"specdec_trace":5}\n', '{"specdec_trace":5,"controller":7}\n', '{"specdec_trace":5,"contr',
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_trace_is_rejected(tmp_path: Path, header: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(header)
    with pytest.raises(ConfigError, match=str(path)):
        read_trace(path)


def test_bytes_that_are_not_text_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "t")


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(
    "line",
    [
        "7", "[]", "{}", "null", '{"drafters":[]}', '{"drafters":7}', '{"drafters":[7],"step":1}', "{broken",
        "[" * 100_000,
        json.dumps({"step": 1, "drafters": [{"name": "a", "decision": "on", "mood": 7}]}),
    ],
)  # fmt: skip
def test_a_line_that_is_not_a_step_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_trace(path)[1])


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 1)
    path.write_text(path.read_text().replace('"rows"', '"cows"'))
    with pytest.raises(ConfigError, match=r"line 2 .*'rows'"):
        list(read_trace(path)[1])


def test_an_unwritable_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trace_file"):
        TraceWriter(tmp_path / "no" / "folder", {})


def test_the_ring_is_bounded_and_its_count_continues() -> None:
    log = TraceLog(5)
    for number in range(12):
        log.add(step(number))
    assert [found.step for found in log.last(100)] == [7, 8, 9, 10, 11]
    assert [found.step for found in log.last(2)] == [10, 11]
    assert log.last(0) == log.last(-3) == []
    assert log.count == 12


@pytest.mark.parametrize("steps", [0, 3])
def test_with_a_file_the_ring_stores_no_replay_data(tmp_path: Path, steps: int) -> None:
    log = TraceLog(steps, TraceWriter(tmp_path / "t.jsonl", {}))
    assert log.keeps_replay
    assert log.enabled
    for number in range(4):
        log.add(step(number, replay={"pending": [1]}))
    assert all(found.replay == {} for found in log.last(10))
    assert len(log.last(10)) == steps
    log.close()
    log.add(step(4))  # nothing is written any more
    log.close()
    assert [found.replay for found in read_trace(tmp_path / "t.jsonl")[1]] == [{"pending": [1]}] * 4


def test_without_ring_and_file_nothing_is_traced() -> None:
    log = TraceLog(0)
    assert not log.enabled
    assert not log.keeps_replay


def test_bug_a_full_disk_ends_only_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path, {})
    log = TraceLog(3, writer)
    log.add(step(0, replay={"pending": [1]}))
    writer.close()
    writer._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    for number in range(1, 300):
        log.add(step(number, replay={"pending": [1]}))
    assert [found.step for found in log.last(1)] == [299]
    assert not log.keeps_replay
    log.close()
    assert [found.step for found in read_trace(path)[1]] == [0]


@pytest.mark.parametrize("place", ["builtins.open", "specdec.control.trace.TraceWriter._line"])
def test_a_disk_that_is_full_at_the_first_step_ends_only_the_trace(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 1)
    for number in range(9):  # starts, of which none deletes an older file
        log = TraceLog(3, TraceWriter(path, {}))
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            log.add(step(number))
        log.add(step(number + 1))
        log.close()
        assert [found.step for found in log.last(9)] == [number, number + 1]
        assert f"cannot be written (no space); it ends before step {number}" in caplog.text
    assert [[found.step for found in read_trace(kept)[1]] for kept in tmp_path.iterdir() if kept.stat().st_size] == [
        [0]
    ]


def full(*_: object, **__: object) -> None:
    raise OSError("no space")


def test_starts_whose_header_alone_fits_on_the_disk_delete_no_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    write(path, 1)
    line = TraceWriter._line

    def header_only(writer: TraceWriter, value: Mapping[str, Any]) -> None:
        if "specdec_trace" in value:
            line(writer, value)
        else:
            writer._file.write("part of a step")  # type: ignore[union-attr]
            raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "_line", header_only)
        for number in range(5):
            log = TraceLog(3, TraceWriter(path, {}))
            log.add(step(number))
            log.close()
    assert {kept.name: kept.stat().st_size > 0 for kept in tmp_path.iterdir()} == {"t.jsonl": False, "t.jsonl.1": True}
    with pytest.raises(ConfigError, match=r"t\.jsonl: is empty; the server writes it from its first step on"):
        read_trace(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_for_a_new_file_does_not_prevent_a_start(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(number, "no room")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", no_room)
        log = TraceLog(3, TraceWriter(tmp_path / "t.jsonl", {}))
    log.add(step(0))
    log.close()
    assert [found.step for found in read_trace(tmp_path / "t.jsonl")[1]] == [0]
