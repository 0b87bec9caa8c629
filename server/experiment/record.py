"""What one request of an experiment was and took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Record:
    """One request in one arm. All times are seconds on one clock of the run, None where that point was not reached.

    A request that failed, was cancelled or ran out of time has a record too: leaving it out would flatter its arm.
    ``request`` is unique in an experiment; a second record of it (a resumed run) is not counted.
    """

    request: str
    arm: str
    arrival: float  # when the request was there to be served
    scheduled: float | None = None  # when the load generator meant it to arrive; None for live traffic
    started: float | None = None  # when it left the queue
    first_token: float | None = None
    end: float | None = None
    tokens: int = 0
    chunks: int = 0  # messages that carried text: fewer than tokens where one step yielded several
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt
    batch: float = 0.0  # mean number of sequences in the steps this request took part in
    accepted: tuple[int, ...] = ()  # accepted[k]: verify steps that accepted k draft tokens
    token_hash: bytes = b""  # of the output's token ids; equal hashes are equal outputs
    block: int = NO_BLOCK  # the time block of a switchback
    pair: str = ""  # what is to be compared with each other: the same prompt, seed and place in the trace
    key: str = ""  # whom the arm sticks to: session, user or prompt
    status: str = "ok"  # "ok", "cancelled", or an upper-case reason
    error: str = ""
    warm_up: bool = False  # kept, but not analysed; blocks' wash-out too
    workload: str = ""
    prompt: str | None = None  # only when the experiment asks for it: it may be confidential
    overridden: bool = False  # its caller chose the arm: kept, but not analysed

    @property
    def ok(self) -> bool:
        return self.status == "ok"


RECORD_FIELDS = tuple(field.name for field in dataclasses.fields(Record))
"""The order in which a record's values are written."""

_values = attrgetter(*RECORD_FIELDS)


def to_row(record: Record) -> tuple[Any, ...]:
    """The record's values in the order of `RECORD_FIELDS`."""
    row: tuple[Any, ...] = _values(record)
    return row


def from_row(names: tuple[str, ...], row: list[Any]) -> Record:
    """A record from values and the names they were written under: unknown ones are dropped, missing ones default.

    Raises:
        ValueError, TypeError: the row does not fit its names, or lacks a field without default.
    """
    values = dict(zip(names, row, strict=True))
    if "accepted" in values:
        values["accepted"] = tuple(values["accepted"])
    return Record(**{name: values[name] for name in RECORD_FIELDS if name in values})
