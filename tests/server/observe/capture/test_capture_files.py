"""Captured requests on the disk: none is lost by a kill, and there are never too many."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.observe.capture import CAPTURE_FILES, CaptureWriter, read_entries

ENTRY = {"text": "x" * 200, "blocks": [b"12345678"], "none": None}


def written(folder: Path, count: int, max_bytes: int = 1 << 20, start: int = 0) -> None:
    out = CaptureWriter(folder, max_bytes)
    for number in range(start, start + count):
        out.write(ENTRY | {"number": number})
    out.close()


def numbers(folder: Path) -> list[int]:
    return [entry["number"] for entry in read_entries(folder)]


def test_records_are_read_in_order(tmp_path: Path) -> None:
    written(tmp_path, 10)
    written(tmp_path, 10, start=10)
    assert numbers(tmp_path) == list(range(20))
    assert next(read_entries(tmp_path)) == ENTRY | {"number": 0}
    assert all(path.stat().st_mode & 0o077 == 0 for path in CAPTURE_FILES.paths(tmp_path))


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    limit = 1 << 16
    written(tmp_path, 1000, limit)
    assert sum(path.stat().st_size for path in CAPTURE_FILES.paths(tmp_path)) <= limit
    kept = numbers(tmp_path)
    assert kept == list(range(1000 - len(kept), 1000))
    assert len(kept) * 230 > limit * 3 / 4


@pytest.mark.parametrize("cut", [1, 100, 300])
def test_a_torn_end_loses_only_the_torn_record(tmp_path: Path, cut: int) -> None:
    written(tmp_path, 5)
    path = CAPTURE_FILES.paths(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-cut])
    written(tmp_path, 2, start=5)
    assert numbers(tmp_path) == [*range(4 if cut < 249 else 3), 5, 6]


def test_other_files_are_ignored(tmp_path: Path) -> None:
    written(tmp_path, 2)
    (tmp_path / "capture-x.sdc").write_text("x")
    (tmp_path / "capture-00000009.sdc").write_text("something else")
    assert numbers(tmp_path) == [0, 1]


def test_skipped_records_are_reported(tmp_path: Path) -> None:
    out = CaptureWriter(tmp_path, 1 << 20)
    with pytest.raises(ValueError, match="at most"):
        out.write({"text": "x" * (17 << 20)})
    out.write(ENTRY | {"number": 1})
    out.close()
    out.close()
    assert numbers(tmp_path) == [1]
