"""Records are read as they were written, up to the point where a file is cut or altered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.experiment.records import (
    RECORD_FIELDS,
    RECORD_FILES,
    ExperimentError,
    Record,
    RecordWriter,
    count_records,
    from_row,
    read_records,
    to_row,
)

_TIME = st.none() | st.floats(allow_nan=False, allow_infinity=False)
_COUNT = st.integers(0, 2**40)
RECORDS = st.builds(
    Record,
    request=st.text(min_size=1),
    arm=st.text(max_size=8),
    arrival=st.floats(allow_nan=False, allow_infinity=False),
    scheduled=_TIME,
    started=_TIME,
    first_token=_TIME,
    end=_TIME,
    tokens=_COUNT,
    cached_tokens=_COUNT,
    accepted=st.lists(_COUNT, max_size=9).map(tuple),
    token_hash=st.binary(max_size=16),
    block=st.integers(-1, 10**6),
    pair=st.text(max_size=5),
    key=st.text(max_size=5),
    status=st.sampled_from(["ok", "cancelled", "UNAVAILABLE"]),
    error=st.text(max_size=20),
    warm_up=st.booleans(),
    longest=_COUNT,
)


def _write(folder: Path, records: list[Record], max_bytes: int = 1 << 30) -> None:
    with closing(RecordWriter(folder, max_bytes)) as writer:
        for record in records:
            writer.write(record)


@given(st.lists(RECORDS, max_size=12, unique_by=lambda r: r.request), st.sampled_from([1, 400, 1 << 30]))
@settings(max_examples=40, deadline=None)
def test_records_are_read_in_order_across_rotations(
    tmp_path_factory: pytest.TempPathFactory, records: list[Record], max_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    _write(folder, records, max_bytes)
    log = read_records(folder)
    assert log.records == records
    assert log.lost_bytes == 0
    assert count_records(folder) == Counter(record.arm for record in records)
    if max_bytes == 1:
        assert len(RECORD_FILES.paths(folder)) == 1 + len(records)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_or_altered_file_yields_every_record_before_the_damage(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    records = [Record(f"r{i}", "a", float(i), accepted=(i, 2), token_hash=bytes([i])) for i in range(8)]
    ends = []
    with closing(RecordWriter(folder)) as writer:
        path = RECORD_FILES.paths(folder)[0]
        ends.append(path.stat().st_size)
        for record in records:
            writer.write(record)
            ends.append(path.stat().st_size)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(8, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:at]
    else:
        content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    whole = sum(end <= at for end in ends[1:])
    log = read_records(folder)
    assert log.records == records[:whole]
    assert log.lost_bytes == len(content) - (ends[whole] if at >= ends[0] else 8)
    assert count_records(folder) == Counter(record.arm for record in log.records)


def test_trailing_zeros_are_not_records(tmp_path: Path) -> None:
    _write(tmp_path, [Record("r", "a", 1.0)])
    with RECORD_FILES.paths(tmp_path)[0].open("ab") as file:
        file.write(bytes(64))
    log = read_records(tmp_path)
    assert (len(log.records), log.lost_bytes) == (1, 64)


def test_a_resumed_run_appends_a_file(tmp_path: Path) -> None:
    first = [Record("r1", "a", 1.0), Record("r2", "b", 2.0)]
    _write(tmp_path, first)
    path = RECORD_FILES.paths(tmp_path)[0]
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    _write(tmp_path, [Record("r2", "b", 3.0)])
    log = read_records(tmp_path)
    assert log.records == [first[0], Record("r2", "b", 3.0)]
    assert path.read_bytes() == torn


def test_records_survive_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from server.experiment.records import RecordWriter\n"
        "from server.experiment.records import Record\n"
        "w = RecordWriter(pathlib.Path(sys.argv[1]))\n"
        "i = 0\n"
        "while True:\n"
        "    w.write(Record(f'r{i}', 'a', float(i)))\n"
        "    print(i, flush=True)\n"
        "    i += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        last = 0
        for line in child.stdout:
            last = int(line)
            if last == 50:
                os.kill(child.pid, signal.SIGKILL)
                break
    records = read_records(tmp_path).records
    assert [r.request for r in records] == [f"r{i}" for i in range(len(records))]
    assert len(records) > last


def test_rows_with_older_and_newer_fields_are_read() -> None:
    names = (*RECORD_FIELDS[:3], "something_new")
    assert from_row(names, ["r", "a", 1.0, "?"]) == Record("r", "a", 1.0)
    assert from_row(RECORD_FIELDS, list(to_row(Record("r", "a", 1.0, tokens=2)))) == Record("r", "a", 1.0, tokens=2)


def test_folders_without_records_and_foreign_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="contains no records"):
        read_records(tmp_path)
    (tmp_path / "records-00001.sdr").write_bytes(b"something else")
    with pytest.raises(ExperimentError, match="not a record file"):
        read_records(tmp_path)


def test_a_full_disk_leaves_the_file_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RecordWriter(tmp_path)) as writer:
        writer.write(Record("r1", "a", 1.0))
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="No space"):
            writer.write(Record("r2", "a", 1.0))
        monkeypatch.undo()
        writer.write(Record("r3", "a", 1.0))
    assert [r.request for r in read_records(tmp_path).records] == ["r1", "r3"]
