"""The record of one request of an experiment, its metrics, and the files of records."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from server.frame_files import FrameFiles, NumberedWriter
from specdec.errors import SpecdecError


class ExperimentError(SpecdecError):
    """An experiment's folder, plan or records cannot be used; the message names which, and the remedy."""


class PlanError(ExperimentError):
    """A plan is rejected; ``problems`` lists every fault, with its line if it has one."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(problems))


NO_BLOCK = -1
CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Record:
    """One request in one arm. Times are seconds on the run's clock, None if that point was not reached.

    Requests that failed, were cancelled or timed out are recorded too; omitting them would favour their arm.
    ``request`` is unique in an experiment, resumed runs included.
    """

    request: str
    arm: str
    arrival: float
    scheduled: float | None = None  # when the load generator's schedule wanted it sent; None for live traffic
    started: float | None = None  # when it left the queue
    first_token: float | None = None
    end: float | None = None
    tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    accepted: tuple[int, ...] = ()  # accepted[k]: verify steps that accepted k draft tokens
    token_hash: bytes = b""  # of the output's token ids; equal hashes are equal outputs
    block: int = NO_BLOCK  # the time block of a switchback
    pair: str = ""  # the same in both arms: one prompt, seed and place in the trace
    key: str = ""  # the assigned unit: session, user or prompt
    status: str = "ok"  # "ok", `CANCELLED`, or an upper-case reason
    error: str = ""
    warm_up: bool = False  # not analysed; also true in a block's wash-out
    overridden: bool = False  # its caller chose the arm; not analysed
    longest: int = 0  # tokens of the longest sample; 0: all are of one

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def cancelled(self) -> bool:
        """Whether its caller ended it, as editors do with each further key. It has neither succeeded nor failed."""
        return self.status == CANCELLED

    @property
    def failed(self) -> bool:
        return not (self.ok or self.cancelled)


class RunClock:
    """The time axis of an experiment: seconds after ``started_s`` (Unix time), across all its runs. Within a process it
    follows ``clock``, which is monotonic."""

    def __init__(self, started_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offset_s = time.time() - started_s - clock()

    def now(self) -> float:
        return self.at(self._clock())

    def at(self, clock_s: float) -> float:
        """A time of ``clock`` on this axis."""
        return clock_s + self._offset_s


class Choice(NamedTuple):
    """The fields of a request's `Record` that are known before it runs."""

    arm: str
    key: str = ""  # digest of the assigned unit; empty: the request itself
    block: int = NO_BLOCK
    warm_up: bool = False  # not analysed: caches are cold, or the previous block is too near
    overridden: bool = False
    request: str = ""
    pair: str = ""


RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(Record))
"""The order of a record's values in a file."""

to_row = attrgetter(*RECORD_FIELDS)
"""The record's values in that order."""


def from_row(names: tuple[str, ...], row: list[Any]) -> Record:
    """A record from values and their field names; unknown names are dropped, missing ones get defaults.

    Raises:
        ValueError, TypeError: the row does not match its names, or lacks a field without default.
    """
    values = dict(zip(names, row, strict=True))
    if "accepted" in values:
        values["accepted"] = tuple(values["accepted"])
    return Record(**{name: values[name] for name in RECORD_FIELDS if name in values})


class Metric(NamedTuple):
    """``value`` returns NaN for a request without this number."""

    title: str
    unit: str
    lower_is_better: bool
    value: Callable[[Record], float]


def _ms(begin: float | None, end: float | None) -> float:
    return math.nan if begin is None or end is None else (end - begin) * 1e3


def _meant(record: Record) -> float:
    """When the request was due: a generator that lags must not hide a queue (coordinated omission)."""
    return record.arrival if record.scheduled is None else record.scheduled


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _tokens(record: Record) -> float:
    """NaN for a text whose tokens its server did not count."""
    return record.tokens if record.tokens or record.first_token is None else math.nan


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "e2e_ms": Metric("Time to the end", "ms", True, lambda r: _ms(_meant(r), r.end)),
        "ttft_ms": Metric("Time to first text", "ms", True, lambda r: _ms(_meant(r), r.first_token)),
        "tpot_ms": Metric(
            "Time per further token",
            "ms",
            True,
            lambda r: _ratio(_ms(r.first_token, r.end), (r.longest or r.tokens) - 1),
        ),
        "queue_ms": Metric("Time in the queue", "ms", True, lambda r: _ms(_meant(r), r.started)),
        "tokens_per_s": Metric(
            "Tokens per second of a request", "/s", False, lambda r: _ratio(_tokens(r) * 1e3, _ms(_meant(r), r.end))
        ),
        "tokens_per_step": Metric(
            "Tokens per verify step",
            "",
            False,
            lambda r: 1 + _ratio(sum(k * n for k, n in enumerate(r.accepted)), sum(r.accepted)),
        ),
        "tokens": Metric("Tokens of the answer", "", False, _tokens),
        "cached_tokens": Metric("Cached prompt tokens", "", False, lambda r: float(r.cached_tokens)),
    }
)
"""All metrics, by the names that plans use. They are measured on requests that ended without error."""


RECORD_FILES = FrameFiles("records-", ".sdr", digits=5, magic=b"SDREC\x00\x00\x01")


class RecordWriter:
    """Writes one frame per record; each file begins with a frame of the field names. A file that reaches ``max_bytes``
    is followed by a new one.

    Raises:
        OSError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path, max_bytes: int = 64 << 20) -> None:
        self._writer, self._max_bytes = NumberedWriter(folder, RECORD_FILES, sync=True), max_bytes
        self._begin_file()

    def write(self, record: Record) -> None:
        """Append a record.

        Raises:
            OSError: the disk is full; the record is not in the file, earlier ones are.
        """
        if self._writer.size >= self._max_bytes:
            self._begin_file()
        self._writer.append(RECORD_FILES.frame(to_row(record)))

    def close(self) -> None:
        """Sync to disk. Idempotent."""
        self._writer.close()

    def _begin_file(self) -> None:
        self._writer.begin_file(RECORD_FILES.frame(RECORD_FIELDS))


@dataclass
class RecordLog:
    """The records of all files, in order."""

    records: list[Record] = field(default_factory=list)
    lost_bytes: int = 0  # behind the last complete record of a file


def read_records(folder: Path) -> RecordLog:
    """Read every record up to each file's first torn or altered frame.

    Raises:
        ExperimentError: the folder has no record file, or one of another layout.
    """
    paths = RECORD_FILES.paths(folder)
    if not paths:
        raise ExperimentError(f"{folder}: contains no records (records-*.sdr); give the folder of an experiment")
    log = RecordLog()
    for path in paths:
        log.lost_bytes += _read_file(path, lambda names, row: log.records.append(from_row(names, row)))
    return log


def count_records(folder: Path) -> Counter[str]:
    """Records by arm, not decoded, which takes a fraction of the time and memory of `read_records`.

    Raises:
        ExperimentError: a record file has another layout.
    """
    counts: Counter[str] = Counter()

    def count(names: tuple[str, ...], row: list[Any]) -> None:
        counts[row[names.index("arm")]] += 1

    for path in RECORD_FILES.paths(folder):
        _read_file(path, count)
    return counts


def _read_file(path: Path, take: Callable[[tuple[str, ...], list[Any]], None]) -> int:
    """Pass each record's field names and values to ``take``; returns the bytes behind the last complete record."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ExperimentError(f"{path}: cannot be read ({error.strerror})") from None
    magic = RECORD_FILES.magic
    if data[: len(magic)] != magic[: len(data)]:
        raise ExperimentError(f"{path}: not a record file of this version")
    names: tuple[str, ...] | None = None
    end = min(len(magic), len(data))
    for row, after in RECORD_FILES.values(data):
        try:
            if names is None:
                names = tuple(map(str, row))
            else:
                take(names, row)
        except (ValueError, TypeError, LookupError):
            break
        end = after
    return len(data) - end
