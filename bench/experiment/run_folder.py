"""The state of an experiment's run: records on disk, progress."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from server.experiment.config import ExperimentConfig
from server.experiment.folder import ExperimentFolder, Manifest, difference
from server.experiment.records import (
    METRICS,
    Choice,
    ExperimentError,
    Record,
    RecordLog,
    RecordWriter,
    RunClock,
)
from specdec.load.request import Outcome
from specdec.load.request import Record as Seen


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Open one with `open_run`."""

    path: Path
    manifest: Manifest
    log: RecordLog  # all records, including earlier runs
    attempt: int  # number of earlier runs
    writer: RecordWriter

    def write(self, records: Iterable[Record]) -> None:
        """Append records; they survive a kill.

        Raises:
            ExperimentError: the disk is full.
        """
        for record in records:
            try:
                self.writer.write(record)
            except OSError as error:
                raise ExperimentError(f"{self.path}: a record cannot be written ({error.strerror})") from None
            self.log.records.append(record)


@contextmanager
def open_run(path: Path, manifest: Manifest) -> Iterator[RunFolder]:
    """The folder at ``path``: a new one, or one of the same experiment to resume.

    Raises:
        ExperimentError: it contains another experiment or other records, another process writes to it, or it cannot
            be written.
    """
    folder = ExperimentFolder(path)
    with folder.locked():
        found, attempt, log = _same(folder, manifest), folder.runs, folder.log()
        with closing(RecordWriter(path)) as writer:
            yield RunFolder(path, found, log, attempt, writer)


def _same(folder: ExperimentFolder, manifest: Manifest) -> Manifest:
    """The manifest to use: with the beginning of the existing one, if that is equal."""
    path = folder.path
    if not folder.exists:
        if folder.runs:
            raise ExperimentError(f"{path}: contains records, but no manifest.json; give another folder with --out")
        folder.write_manifest(manifest)
        return manifest
    before = folder.manifest()
    # The path of a trace depends on the working directory; the facts have its digest.
    then, now = (each.config.model_dump(mode="json", exclude={"load": {"trace"}}) for each in (before, manifest))
    if place := difference(then, now, "plan") or difference(before.facts, manifest.facts, "facts"):
        raise ExperimentError(
            f"{path}: contains a run of another experiment ({place}); resume that one, or give another --out"
        )
    return manifest.model_copy(update={"started": before.started})


_STATUS: Mapping[Outcome, str] = {"ok": "ok", "refused": "REFUSED", "failed": "FAILED", "cut": "TIMED_OUT"}


def record_of(seen: Seen, choice: Choice, clock: RunClock, *, scheduled: bool, by_ids: bool) -> Record:
    """The record of ``seen``, the outcome of a request.

    clock: on the event loop's time. scheduled: the request had an arrival time. by_ids: compare outputs by token ids,
    else by text. The server's queue time counts from the sending: a connection may take time.
    """
    return Record(
        **choice._asdict(),
        arrival=clock.at(seen.sent_s),
        scheduled=clock.at(seen.due_s) if scheduled else None,
        started=None if seen.queue_ms is None else clock.at(seen.sent_s + seen.queue_ms / 1e3),
        first_token=clock.at(seen.chunk_s[0]) if seen.chunk_s else None,
        end=clock.at(seen.end_s),
        tokens=seen.output_tokens,
        cached_tokens=seen.cached_tokens,
        accepted=seen.accepted,
        token_hash=_output_hash(seen, by_ids) if seen.ok else b"",
        status=_STATUS[seen.outcome],
        error=seen.error,
    )


def _output_hash(seen: Seen, by_ids: bool) -> bytes:
    """Empty if the server did not report the token ids that are to be compared."""
    if by_ids and seen.token_ids is None:
        return b""
    output = ",".join(map(str, seen.token_ids or ())) if by_ids else seen.text
    return blake2b(output.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Progress:
    """Counts over the records so far, without warm-up. planned: number of pairs; None if only time limits the run."""

    def __init__(self, config: ExperimentConfig, planned: int | None) -> None:
        self.names = tuple(config.arms)
        self.metric = config.primary.metric
        self.planned = planned
        self.done: set[str] = set()  # pairs with a record in both arms
        self.mismatched: set[str] = set()  # pairs with different outputs
        self.failed = [0, 0]  # requests by arm
        self._values: tuple[list[float], list[float]] = ([], [])
        self._open: dict[str, Record] = {}

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.warm_up:
                continue
            arm = self.names.index(record.arm)
            self.failed[arm] += not record.ok
            value = METRICS[self.metric].value(record) if record.ok else math.nan
            if math.isfinite(value):
                self._values[arm].append(value)
            self._pair(record)

    def medians(self) -> tuple[float | None, float | None]:
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
