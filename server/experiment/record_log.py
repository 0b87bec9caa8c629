"""Reads what an experiment has written down, however it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from server.experiment.experiment_errors import ExperimentError
from server.experiment.record import Record, from_row
from server.experiment.record_frame import frames
from server.experiment.record_segments import MAGIC, segments


@dataclass
class RecordLog:
    """The records of all files in order, each request once."""

    records: list[Record] = field(default_factory=list)
    repeated: int = 0  # records of a request that already had one
    lost_bytes: int = 0  # behind the last complete record of a file


def read_records(folder: Path) -> RecordLog:
    """Read every record up to each file's first torn or altered frame.

    Raises:
        ExperimentError: the folder holds no record file, or one of another layout.
    """
    paths = segments(folder)
    if not paths:
        raise ExperimentError(f"{folder}: holds no records (records-*.sdr); give the folder an experiment wrote to")
    log = RecordLog()
    seen: set[str] = set()
    for path in paths:
        _read_segment(path, log, seen)
    return log


def _read_segment(path: Path, log: RecordLog, seen: set[str]) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ExperimentError(f"{path}: can not be read ({error.strerror})") from None
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise ExperimentError(f"{path}: not a record file of this version")
    names: tuple[str, ...] | None = None
    end = min(len(MAGIC), len(data))
    for payload, after in frames(data, len(MAGIC)):
        try:
            row = msgpack.unpackb(payload, raw=False, strict_map_key=False)
            if names is None:
                names = tuple(map(str, row))
            else:
                record = from_row(names, row)
                if record.request in seen:
                    log.repeated += 1
                else:
                    seen.add(record.request)
                    log.records.append(record)
        except (ValueError, TypeError, msgpack.UnpackException):
            break
        end = after
    log.lost_bytes += len(data) - end
