"""What can be said about a request in one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from server.experiment.record import Record


class Metric(NamedTuple):
    """``value`` gives NaN where a request has no such number."""

    title: str
    unit: str
    lower_is_better: bool
    value: Callable[[Record], float]


def _ms(begin: float | None, end: float | None) -> float:
    return math.nan if begin is None or end is None else (end - begin) * 1e3


def _meant(record: Record) -> float:
    """When it should have arrived: a generator that lags must not hide a queue (coordinated omission)."""
    return record.arrival if record.scheduled is None else record.scheduled


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "e2e_ms": Metric("Time to the end", "ms", True, lambda r: _ms(_meant(r), r.end)),
        "ttft_ms": Metric("Time to first text", "ms", True, lambda r: _ms(_meant(r), r.first_token)),
        "tpot_ms": Metric(
            "Time per further token", "ms", True, lambda r: _ratio(_ms(r.first_token, r.end), r.tokens - 1)
        ),
        "queue_ms": Metric("Time in the queue", "ms", True, lambda r: _ms(_meant(r), r.started)),
        "tokens_per_s": Metric(
            "Tokens per second of a request", "/s", False, lambda r: _ratio(r.tokens * 1e3, _ms(_meant(r), r.end))
        ),
        "tokens_per_step": Metric(
            "Tokens per verify step",
            "",
            False,
            lambda r: 1 + _ratio(sum(k * n for k, n in enumerate(r.accepted)), sum(r.accepted)),
        ),
        "tokens_per_chunk": Metric("Tokens per message", "", False, lambda r: _ratio(r.tokens, r.chunks)),
        "tokens": Metric("Tokens of the answer", "", False, lambda r: float(r.tokens)),
        "cached_tokens": Metric("Cached prompt tokens", "", False, lambda r: float(r.cached_tokens)),
        "batch": Metric("Sequences in a step", "", True, lambda r: r.batch),
    }
)
"""All metrics, by the names that plans use. Only requests that ended well are measured: the others are errors."""
