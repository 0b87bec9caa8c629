"""Captured requests on the disk: none is lost by a kill, and there are never too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.observe.capture import CAPTURE_FILES, Capture
from specdec.errors import ConfigError
from specdec.load.trace_file import read_trace_lines
from tests.server.observe.capture.lines import captured_lines

LINE = {"prompt": "x" * 200, "stop": ("a\u2028b",), "seed": None}


def written(folder: Path, count: int, max_bytes: int = 1 << 20, start: int = 0) -> None:
    out = Capture(folder, max_bytes, prompts=True)
    for number in range(start, start + count):
        out.write(LINE | {"offset_s": 1.7e9 + number})
    out.close()


def numbers(folder: Path) -> list[int]:
    """Of the readable lines; the first counts as 0."""
    return [round(line.offset_s) for _, line in read_trace_lines(folder)]


def test_records_are_read_in_order(tmp_path: Path) -> None:
    written(tmp_path, 10)
    written(tmp_path, 10, start=10)
    assert numbers(tmp_path) == list(range(20))
    assert captured_lines(tmp_path)[0] == {**LINE, "stop": ["a\u2028b"], "offset_s": 1.7e9}
    places = [place for place, _ in read_trace_lines(tmp_path)]
    assert (places[0], places[-1]) == ("capture-00000001.jsonl, line 1", "capture-00000002.jsonl, line 10")
    assert all(path.stat().st_mode & 0o077 == 0 for path in CAPTURE_FILES.paths(tmp_path))


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    limit = 1 << 16
    written(tmp_path, 1000, limit)
    assert sum(path.stat().st_size for path in CAPTURE_FILES.paths(tmp_path)) <= limit
    kept = [line["offset_s"] - 1.7e9 for line in captured_lines(tmp_path)]
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) * 260 > limit * 3 / 4


@pytest.mark.parametrize("cut", [1, 100, 300])
def test_a_torn_end_loses_only_the_torn_record(tmp_path: Path, cut: int) -> None:
    written(tmp_path, 5)
    path = CAPTURE_FILES.paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-cut])
    written(tmp_path, 2, start=5)
    assert numbers(tmp_path) == [*range(4 if cut < 260 else 3), 5, 6]
    assert len(read_trace_lines(path)) == (4 if cut < 260 else 3)


def test_other_files_are_ignored(tmp_path: Path) -> None:
    written(tmp_path, 2)
    for name in ("decisions.jsonl", "capture-of-monday.jsonl"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "capture-00000009.old").write_text("something else")
    assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("name", ["capture-of-monday.jsonl", "20261128.jsonl"])
def test_a_file_of_ones_own_keeps_its_last_line(tmp_path: Path, name: str) -> None:
    (file := tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert [line.prompt for _, line in read_trace_lines(file)] == ["a", "b"]


def test_a_folder_without_captures_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no captured requests; start the server with --capture"):
        read_trace_lines(tmp_path)
    Capture(tmp_path, 1 << 20, prompts=True).close()
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace_lines(tmp_path)


def test_skipped_records_are_reported(tmp_path: Path) -> None:
    out = Capture(tmp_path, 1 << 16, prompts=True)
    with pytest.raises(ValueError, match="at most"):
        out.write({"prompt": "x" * (1 << 12)})
    out.write(LINE | {"offset_s": 1.0})
    out.close()
    out.close()
    assert numbers(tmp_path) == [0]
