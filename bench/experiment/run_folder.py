"""State of an experiment's run: records on disk, clock, progress, lost servers, the rule that ends it."""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.serve.request import Ask, Outcome
from bench.serve.request import Record as Seen
from server.experiment.analysis.analyse import analyse
from server.experiment.config import ExperimentConfig, Manifest
from server.experiment.records import (
    METRICS,
    NO_BLOCK,
    RECORD_FILES,
    ExperimentError,
    Record,
    RecordLog,
    RecordWriter,
    read_records,
)


class RunFolder:
    """``attempt``: how often a run here was taken up, 0 for a fresh one. ``log``: every record, earlier ones too.

    Open one with `open_run`.
    """

    def __init__(self, path: Path, manifest: Manifest, log: RecordLog, attempt: int, writer: RecordWriter) -> None:
        self.path, self.manifest, self.log, self.attempt = path, manifest, log, attempt
        self._writer = writer

    @property
    def started_s(self) -> float:
        """When the run began, in Unix time: the zero of the records' clock."""
        return datetime.datetime.fromisoformat(self.manifest.started).timestamp()

    def write(self, records: Iterable[Record]) -> None:
        """Keep records; they survive the death of the process.

        Raises:
            ExperimentError: there is no room.
        """
        for record in records:
            try:
                self._writer.write(record)
            except OSError as error:
                raise ExperimentError(f"{self.path}: a record can not be written ({error.strerror})") from None
            self.log.records.append(record)


@contextmanager
def open_run(path: Path, manifest: Manifest) -> Iterator[RunFolder]:
    """The folder at ``path``: a new one, or that of the same experiment to go on with.

    Raises:
        ExperimentError: it holds another experiment or other files' records, somebody else writes to it, or it can not
            be written.
    """
    with _locked(path):
        found = _same(path, manifest)
        attempt = len(RECORD_FILES.paths(path))
        log = read_records(path) if attempt else RecordLog()
        with RecordWriter(path) as writer:
            yield RunFolder(path, found, log, attempt, writer)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The system lets go of the lock when the process ends, in whatever way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ExperimentError(f"{path}: can not be used ({error.strerror}); give another folder with --out") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ExperimentError(f"{path}: another process runs this experiment; wait, or give another --out") from None
    try:
        yield
    finally:
        os.close(handle)


def _same(path: Path, manifest: Manifest) -> Manifest:
    """The manifest in force: the one that is there, if it says the same."""
    if not (path / "manifest.json").exists():
        if RECORD_FILES.paths(path):
            raise ExperimentError(f"{path}: holds records, but no manifest.json; give another folder with --out")
        manifest.write(path)
        return manifest
    before = Manifest.read(path)
    for name, then, now in (
        ("plan", before.config.model_dump(mode="json"), manifest.config.model_dump(mode="json")),
        ("facts", before.facts, manifest.facts),
    ):
        place = _difference(then, now, name)
        if place:
            raise ExperimentError(
                f"{path}: holds a run of another experiment ({place}); go on with that one, or give another --out"
            )
    return before


def _difference(then: Any, now: Any, place: str) -> str:
    """The first place at which two JSON values differ, with both values; empty where none does."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *(key for key in now if key not in then)]:
            found = _difference(then.get(key), now.get(key), f"{place}.{key}")
            if found:
                return found
        return ""
    return "" if then == now else f"{place} was {then!r} and is {now!r}"


_STATUS: Mapping[Outcome, str] = {"ok": "ok", "refused": "REFUSED", "failed": "FAILED", "cut": "TIMED_OUT"}


def to_record(
    seen: Seen,
    *,
    ask: Ask,
    arm: str,
    zero_s: float,
    scheduled: bool,
    by_ids: bool,
    block: int = NO_BLOCK,
    pair: str = "",
    warm_up: bool = False,
    prompt: str | None = None,
) -> Record:
    """The record of ``seen``, whose request was ``ask``.

    zero_s: the beginning of the run on the event loop's clock. scheduled: it had an arrival time. by_ids: outputs are
    compared by token ids, else by text. A server may be asked over a connection that takes time: what it says of its
    queue counts from the sending.
    """
    hashed = seen.token_hash if by_ids else seen.text_hash
    return Record(
        request=f"{seen.name}/{arm}",
        arm=arm,
        arrival=seen.sent_s - zero_s,
        scheduled=seen.due_s - zero_s if scheduled else None,
        started=None if seen.queue_ms is None else seen.sent_s - zero_s + seen.queue_ms / 1e3,
        first_token=seen.chunk_s[0] - zero_s if seen.chunk_s else None,
        end=seen.end_s - zero_s,
        tokens=seen.output_tokens,
        chunks=len(seen.chunk_s),
        prompt_tokens=seen.prompt_tokens,
        cached_tokens=seen.cached_tokens,
        accepted=seen.accepted,
        token_hash=hashed if seen.ok else b"",
        block=block,
        pair=pair,
        key=ask.session,
        status=_STATUS[seen.outcome],
        error=seen.error,
        warm_up=warm_up,
        workload=ask.name,
        prompt=prompt,
    )


def prompt_of(ask: Ask) -> str:
    """The prompt in words, for plans that keep prompts."""
    if ask.gap is not None:
        return f"{ask.gap.prefix}<gap>{ask.gap.suffix}"
    if ask.chat:
        return "\n".join(f"{turn.role}: {turn.content}" for turn in ask.chat)
    return ask.text or " ".join(map(str, ask.ids))


class RunClock:
    """``zero_s``: the beginning of the run on the event loop's clock, by which everything in this process is timed."""

    def __init__(self, started_s: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._begun_s = self._clock()
        self.zero_s = self._begun_s - (time.time() - started_s)

    @property
    def spent_s(self) -> float:
        """Seconds since this process began to ask."""
        return self._clock() - self._begun_s

    def begin(self) -> None:
        """It begins to ask."""
        self._begun_s = self._clock()


class Board:
    """Counts of what was recorded so far, without the warm-up. ``done``: pairs with a record in both arms;
    ``mismatched``: those of them that were answered differently; ``failed``: requests per arm. ``planned``: pairs, or
    None where only time ends it."""

    def __init__(self, config: ExperimentConfig, planned: int | None) -> None:
        self.names = (config.control, config.treatment)
        self.metric = config.primary.metric
        self.planned = planned
        self.done: set[str] = set()
        self.mismatched: set[str] = set()
        self.asked, self.failed = [0, 0], [0, 0]
        self._values: tuple[list[float], list[float]] = ([], [])
        self._open: dict[str, Record] = {}

    def add(self, records: Iterable[Record]) -> None:
        """More records."""
        for record in records:
            if record.warm_up or record.arm not in self.names:
                continue
            arm = self.names.index(record.arm)
            self.asked[arm] += 1
            self.failed[arm] += not record.ok
            value = METRICS[self.metric].value(record) if record.ok else math.nan
            if math.isfinite(value):
                self._values[arm].append(value)
            if record.pair:
                self._pair(record)

    def medians(self) -> tuple[float | None, float | None]:
        """Of the primary metric, in both arms."""
        a, b = (statistics.median(values) if values else None for values in self._values)
        return a, b

    def _pair(self, record: Record) -> None:
        other = self._open.pop(record.pair, None)
        if other is None or other.arm == record.arm:
            self._open[record.pair] = record
            return
        self.done.add(record.pair)
        if record.ok and other.ok and record.token_hash != other.token_hash:
            self.mismatched.add(record.pair)


_PATIENCE = 3


class Pulse:
    """folder: of the run, for the way out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._silent = 0

    def check(self, records: Sequence[Record]) -> None:
        """Hear of the next turn or block.

        Raises:
            ExperimentError: nothing was answered in three of them.
        """
        self._silent = 0 if any(record.ok for record in records) else self._silent + 1
        if self._silent >= _PATIENCE:
            raise ExperimentError(
                f"nothing is answered any more ({records[-1].error}); the same command goes on with {self._folder}"
            )


_DECIDED = ("better", "worse", "equivalent")
_GROWTH = 1.1  # looks get rarer as records become many: all of them together cost about ten of the last


class StopRule:
    """Looks at the records of ``log`` as they grow, where the plan's intervals hold whenever one looks."""

    def __init__(self, manifest: Manifest, log: RecordLog) -> None:
        self._manifest, self._log = manifest, log
        self._stopping = manifest.config.stopping
        self._next = self._stopping.min_units

    def why(self, units: int, mismatched: int, spent_s: float) -> str:
        """Why to stop after ``units`` pairs or blocks and ``spent_s`` seconds; empty: go on."""
        limit = self._stopping.max_duration
        if limit is not None and spent_s >= limit:
            return f"{limit:g} s have passed"
        if self._stopping.rule != "always_valid" or units < self._next:
            return ""
        self._next = max(units + 1, math.ceil(units * _GROWTH))
        if mismatched and self._manifest.config.assignment.expect_same_tokens:
            return f"{mismatched} pairs got different tokens, and whatever follows can not mend that"
        kind = analyse(self._manifest, self._log).verdict.kind
        return f"the verdict is certain: {kind}" if kind in _DECIDED else ""
