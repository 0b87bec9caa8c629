"""All that visitors do, and how often each of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from bench.soak import grpc_visits, http_visits, raw_visits, session_visits
from bench.soak.place import Place

Visit = Callable[[Place], Coroutine[Any, Any, str]]
VISITS: dict[Visit, int] = {
    grpc_visits.whole_stream: 6,
    grpc_visits.whole_answer: 3,
    grpc_visits.gap: 3,
    grpc_visits.leave_after_some: 4,
    grpc_visits.leave_any_time: 6,
    grpc_visits.deadline: 3,
    grpc_visits.slow_reader: 2,
    grpc_visits.aborted: 2,
    grpc_visits.superseded: 2,
    grpc_visits.prefill: 2,
    session_visits.typing: 4,
    session_visits.typing_and_gone: 3,
    http_visits.sse: 4,
    http_visits.sse_left: 3,
    http_visits.whole: 3,
    http_visits.whole_left: 4,
    http_visits.lines: 2,
    http_visits.infill: 2,
    http_visits.looks: 1,
    raw_visits.half_a_head: 1,
    raw_visits.half_a_body: 1,
    raw_visits.silence: 1,
    raw_visits.half_open: 1,
    raw_visits.never_read: 2,
    raw_visits.half_closed: 1,
    raw_visits.nonsense: 1,
}


def name_of(visit: Visit) -> str:
    """As the table of a soak has it."""
    face = visit.__module__.rpartition(".")[2].removesuffix("_visits")
    return f"{face} {visit.__name__.replace('_', ' ')}"
