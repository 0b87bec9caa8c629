"""The record of a request in an experiment, and the thread that writes records."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

from server.errors import RECORDS_FILE, FileErrors
from server.experiment.records import CANCELLED, Choice, Record, RecordWriter, RunClock
from server.observe.records import RequestRecord
from specdec.core.types import Finished, FinishReason
from specdec.errors import RequestError

_LOG = logging.getLogger(__name__)


def record_of(choice: Choice, seen: RequestRecord, clock: RunClock) -> Record:
    started = seen.started
    status, error = _status(seen)
    return Record(
        **choice._asdict(),
        arrival=clock.at(seen.began_s),
        started=None if started is None else clock.at(seen.made_s + started.queue_ms / 1e3),
        first_token=None if seen.first_s is None else clock.at(seen.first_s),
        end=clock.at(seen.ended_s),
        tokens=seen.output_tokens,
        cached_tokens=0 if started is None else started.cached_tokens,
        accepted=_accepted(seen.finished),
        status=status,
        error=error,
        longest=max((sample.tokens for sample in seen.samples.values()), default=0),
    )


def refused_record(choice: Choice, error: RequestError, clock: RunClock, at_s: float) -> Record:
    """The record of a request that was refused: its arm was too busy, or down. at_s: monotonic."""
    return Record(**choice._asdict(), arrival=clock.at(at_s), end=clock.at(at_s), status=error.reason, error=str(error))


def _status(seen: RequestRecord) -> tuple[str, str]:
    if seen.error is not None:
        return seen.error.reason, str(seen.error)
    ends = {finished.reason for finished in seen.finished}
    if not seen.complete or FinishReason.ABORTED in ends:
        return CANCELLED, ""
    return ("DEADLINE_EXCEEDED", "") if FinishReason.DEADLINE in ends else ("ok", "")


def _accepted(finished: Sequence[Finished]) -> tuple[int, ...]:
    """Steps by number of accepted draft tokens, over all samples; a step without draft accepted none."""
    columns = zip_longest(*(end.stats.acceptance_histogram for end in finished), fillvalue=0)
    counts = [sum(column) for column in columns]
    plain = sum(end.stats.num_steps - end.stats.num_spec_steps for end in finished)
    return (counts[0] + plain, *counts[1:]) if counts else ((plain,) if plain else ())


class RecordSink:
    """Writes records in a thread of its own. Records that cannot be written, as on a full disk, are counted as lost;
    later ones are tried again.

    Raises:
        OSError: the folder cannot be written at start.
    """

    def __init__(self, folder: Path, file_errors: FileErrors) -> None:
        self._folder, self._writer, self._errors = folder, RecordWriter(folder), file_errors
        self.lost: Counter[str] = Counter()  # records that were not written, by arm
        self._failing = False
        self._thread = ThreadPoolExecutor(1, "experiment-records")

    def put(self, arm: str, make: Callable[[], Record]) -> None:
        """Write the record that ``make`` returns; does not block."""
        self._thread.submit(self._write, arm, make)

    def close(self) -> None:
        """Write what is queued, sync, and end the thread. May block on the disk."""
        self._thread.shutdown()
        try:
            self._writer.close()
        except OSError as error:
            self._failed(error)

    def _write(self, arm: str, make: Callable[[], Record]) -> None:
        try:
            self._writer.write(make())
        except OSError as error:
            self.lost[arm] += 1
            self._failed(error)
        except Exception:
            self.lost[arm] += 1
            _LOG.exception("an experiment's record was not written")
        else:
            if self._failing:
                _LOG.info("%s: records are written again", self._folder)
            self._failing = False

    def _failed(self, error: OSError) -> None:
        self._errors[RECORDS_FILE] += 1
        if not self._failing:
            _LOG.error("%s: %s; records are lost until it can be written", self._folder, error.strerror)
        self._failing = True
