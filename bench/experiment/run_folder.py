"""Where an experiment's run is written down, and what of an earlier try of it is there."""

from __future__ import annotations

import datetime
import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.experiment.experiment_errors import ExperimentError
from server.experiment.manifest import Manifest
from server.experiment.record import Record
from server.experiment.record_log import RecordLog, read_records
from server.experiment.record_segments import segments
from server.experiment.record_writer import RecordWriter


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
        attempt = len(segments(path))
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
        if segments(path):
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
