"""Logs every call once it is over, and every request of a session that makes many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from server.logs.held_lines import HeldLines
from server.telemetry.call_record import CallRecord
from server.telemetry.request_record import RequestRecord

LOGGER = "specdec.calls"

Decode = Callable[[Sequence[int]], str]


class CallLog:
    """Says who asked what kind of thing and how it went: numbers, names and causes. Texts only where ``decode``, which
    turns a prompt's tokens into its text, is given."""

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode
        self._lines = HeldLines(logging.getLogger(LOGGER))

    def call_began(self, call: CallRecord) -> None:
        """Nothing is said of a call before it is over."""

    def call_ended(self, call: CallRecord) -> None:
        """Log it."""
        if not self._lines.wanted:
            return
        figures = self._settled_figures(call.requests)
        self._lines.say(
            "call",
            call.at_s + call.duration_s,
            lambda: (
                _call_fields(call)
                | {"status": call.status, "duration_ms": _ms(call.duration_s)}
                | ({"reason": call.reason} if call.reason else {})
                | figures()
            ),
        )

    def request_ended(self, record: RequestRecord) -> None:
        """Log it, if its call makes many."""
        call = record.call
        if call is None or not call.many or not self._lines.wanted:
            return
        reason = {} if record.error is None else {"reason": getattr(record.error, "reason", "INTERNAL")}
        self._lines.say(
            "request",
            call.at_s + record.ended_s - call.began_s,
            lambda: (
                _call_fields(call)
                | {"duration_ms": _ms(record.ended_s - record.began_s)}
                | reason
                | self._figures([record])
            ),
        )

    def close(self) -> None:
        """Write what is held back."""
        self._lines.close()

    def _settled_figures(self, records: Sequence[RequestRecord]) -> Callable[[], dict[str, Any]]:
        """What `_figures` gives now, worked out later where it stays so."""
        records = tuple(records)
        if all(record.ended_s for record in records):
            return lambda: self._figures(records)
        figures = self._figures(records)
        return lambda: figures

    def _figures(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """What the engine did for a call; empty where it was not asked."""
        if not records:
            return {}
        started = [record.started for record in records if record.started is not None]
        finished = [end for record in records for end in record.finished]
        times = [record.ttft_s for record in records if record.ttft_s is not None]
        found: dict[str, Any] = {
            "request": ",".join(record.request.request_id for record in records),
            "prompt_tokens": sum(event.prompt_tokens for event in started),
            "cached_tokens": sum(event.cached_tokens for event in started),
            "output_tokens": sum(record.output_tokens for record in records),
        }
        if started:
            found["queue_ms"] = round(max(event.queue_ms for event in started), 3)
        if times:
            found["ttft_ms"] = _ms(min(times))
        if finished:
            found["finish"] = ",".join(sorted({end.reason.value for end in finished}))
        steps = sum(end.stats.num_steps for end in finished)
        if steps:
            drafted = sum(end.stats.num_draft_tokens for end in finished)
            accepted = sum(end.stats.num_accepted_draft_tokens for end in finished)
            found |= {"steps": steps, "drafted": drafted, "accepted": accepted}
            if drafted:
                found["acceptance"] = round(accepted / drafted, 4)
        if not all(record.complete for record in records):
            found["left"] = True
        if self._decode is not None:
            found["prompt"] = "\n".join(self._decode(record.request.prompt_ids) for record in records)
            found["output"] = "".join(text for record in records for text in record.text)
        return found


def _call_fields(call: CallRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"request_id": call.request_id, "face": call.face, "endpoint": call.endpoint}
    if call.key:
        fields |= {"key": call.key, "tenant": call.tenant}
    if call.trace_id:
        fields["trace_id"] = call.trace_id
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
