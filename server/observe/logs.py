"""Logs: one line per call, as JSON or as text, without anybody's prompts unless they are asked for."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from server.observe.records import CallRecord, RequestRecord, TelemetryListener

_LOG = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, then what the record's ``fields`` hold."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str).translate(_JSON_CONTROL)


# Terminals obey DEL and the C1 controls too; U+2028 and U+2029 end a line for some readers.
_BEYOND_ASCII = (*range(127, 160), 0x2028, 0x2029)
_JSON_CONTROL = {code: f"\\u{code:04x}" for code in _BEYOND_ASCII}
_CONTROL = {code: f"\\x{code:02x}" for code in range(32) if code not in (9, 10)} | {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _BEYOND_ASCII
}


class TextLines(logging.Formatter):
    """Time, level, logger and message, then ``name=value`` for each of the record's ``fields``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """As lines; control characters are spelled out, so that nobody's header can write to a terminal."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        said = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
        return f"{super().format(record)} {said}".rstrip().translate(_CONTROL)


def _value(value: Any) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() for c in text) else text


LogFormat = Literal["auto", "json", "text"]


def configure_logs(kind: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Everything that is logged goes to ``stream`` (default: standard error); `auto` is text on a terminal, else JSON.

    What was set up before is replaced.
    """
    stream = stream or sys.stderr
    text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if text else JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


HELD_S = 0.02

Fields = Callable[[], dict[str, Any]]


class HeldLines:
    """Lines of ``logger``, INFO, written up to `HELD_S` seconds late where they come from an event loop: a client that
    just got its answer may have sent its next call, and other people's tokens may be there."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._held: list[tuple[str, float, Fields]] = []
        self._due = self._closed = False

    @property
    def wanted(self) -> bool:
        """Whether anybody would see a line."""
        return self._logger.isEnabledFor(logging.INFO)

    def say(self, message: str, at_s: float, fields: Fields) -> None:
        """Write ``message`` as of ``at_s`` (Unix time) with what ``fields`` gives then."""
        self._held.append((message, at_s, fields))
        if self._due:
            return
        try:
            loop = None if self._closed else asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None:
            self._write()
        else:
            self._due = True
            loop.call_later(HELD_S, self._write)

    def close(self) -> None:
        """Write what is held, and hold nothing from now on. May be called from any thread."""
        self._closed = True
        self._write()

    def _write(self) -> None:
        self._due = False
        held, self._held = self._held, []
        for message, at_s, fields in held:
            try:
                extra = {"fields": fields()}
            except Exception:
                _LOG.exception("a line of %s is lost", self._logger.name)
                continue
            line = self._logger.makeRecord(self._logger.name, logging.INFO, "", 0, message, (), None, extra=extra)
            line.created, line.msecs = at_s, int(at_s % 1 * 1e3)
            self._logger.handle(line)


LOGGER = "specdec.calls"

Decode = Callable[[Sequence[int]], str]
PromptText = Callable[[RequestRecord], str]


class CallLog(TelemetryListener):
    """Says who asked what kind of thing and how it went: numbers, names and causes. Texts only where ``prompt_text``
    is given."""

    def __init__(self, prompt_text: PromptText | None = None) -> None:
        self._prompt_text = prompt_text
        self._lines = HeldLines(logging.getLogger(LOGGER))

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
        if records[0].model:
            found["model"] = records[0].model
        if self._prompt_text is not None:
            found["prompt"] = "\n".join(map(self._prompt_text, records))
            found["output"] = "".join(text for record in records for text in record.text)
        return found


def _call_fields(call: CallRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {"request_id": call.request_id, "face": call.protocol, "endpoint": call.endpoint}
    if call.key:
        fields |= {"key": call.key, "tenant": call.tenant}
    if call.trace_id:
        fields["trace_id"] = call.trace_id
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
