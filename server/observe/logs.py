"""Logs: one line per call, as JSON or text. Prompts and outputs are logged only on request."""

from __future__ import annotations

import json
import logging
import select
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from server.auth.access import HEALTH_PATHS
from server.observe.records import CallRecord, RequestRecord, TelemetryListener


class JsonLines(logging.Formatter):
    """``time`` (UTC, ISO 8601), ``level``, ``logger``, ``message``, then what the record's ``fields`` hold."""

    def format(self, record: logging.LogRecord) -> str:
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


# Terminals interpret DEL and the C1 controls too; some readers end a line at U+2028 and U+2029.
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
        """Control characters are escaped, so that a header cannot write to a terminal."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        text = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
        return f"{super().format(record)} {text}".rstrip().translate(_CONTROL)


def _value(value: Any) -> str:
    text = f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() for c in text) else text


class _DroppingHandler(logging.StreamHandler[TextIO]):
    """Drops lines, and counts them, while a pipe is full or a terminal stopped: waiting would stop the whole server.
    A pipe that is ready takes 4 KiB, so a line is written in pieces, and cut where the reader stops."""

    _PATIENCE_S = 0.1  # for a reader that is only slow
    _lost = 0  # since the last line that was written
    _unended = ""  # the line break that a line which was cut still lacks

    def emit(self, record: logging.LogRecord) -> None:
        if self._lost and self._is_ready():
            lost, self._lost = self._lost, 0
            logging.getLogger(__name__).warning("%d log lines were lost, because the output was not read", lost)
        try:
            line = self._unended + self.format(record) + self.terminator
            size = 4096 if line.isascii() else 400  # characters, of up to 10 bytes: an escape such as \U0001f600
            for at in range(0, len(line), size):
                if not self._is_ready():
                    self._lost += 1
                    break
                self.stream.write(line[at : at + size])
                self.flush()
                self._unended = "" if at + size >= len(line) else self.terminator
        except Exception:
            self.handleError(record)

    def _is_ready(self) -> bool:
        try:
            return bool(select.select([], [self.stream], [], 0 if self._lost else self._PATIENCE_S)[1])
        except (OSError, TypeError, ValueError):  # not a file of the system
            return True


LogFormat = Literal["auto", "json", "text"]


def configure_logs(kind: LogFormat, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all logging to ``stream`` (default: standard error). `auto` is text on a terminal, else JSON. Replaces an
    earlier configuration."""
    stream = stream or sys.stderr
    text = kind == "text" or (kind == "auto" and stream.isatty())
    handler = _DroppingHandler(stream)
    handler.setFormatter(TextLines() if text else JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


LOGGER = "specdec.calls"
MAX_LOGGED_IDS = 128  # of a call's requests; a call may embed thousands of texts

_POLLED = "/v1/loads"  # by routers, each second

PromptText = Callable[[RequestRecord], str]


class CallLog(TelemetryListener):
    """Logs one line per call: names, figures and the reason of a refusal; none for `HEALTH_PATHS`, which probes
    call every second, nor for an answered call of `_POLLED`. ``prompt_text`` None: no texts."""

    def __init__(self, prompt_text: PromptText | None = None) -> None:
        self._prompt_text = prompt_text
        self._logger = logging.getLogger(LOGGER)

    def call_ended(self, call: CallRecord) -> None:
        polled = call.endpoint in HEALTH_PATHS or (call.endpoint == _POLLED and not call.reason)
        if not polled and self._logger.isEnabledFor(logging.INFO):
            ended = {"status": call.status, "duration_ms": _ms(call.duration_s)}
            self._log("call", call, ended, call.reason, call.requests)

    def request_ended(self, record: RequestRecord) -> None:
        """Log the request, if its call is a session of many requests."""
        call = record.call
        if call is not None and call.many and self._logger.isEnabledFor(logging.INFO):
            reason = "" if record.error is None else record.error.reason
            self._log("request", call, {"duration_ms": _ms(record.ended_s - record.began_s)}, reason, [record])

    def _log(
        self, message: str, call: CallRecord, ended: dict[str, Any], reason: str, records: Sequence[RequestRecord]
    ) -> None:
        fields: dict[str, Any] = {"request_id": call.request_id, "face": call.protocol, "endpoint": call.endpoint}
        if call.key:
            fields |= {"key": call.key, "tenant": call.tenant}
        if call.trace_id:
            fields["trace_id"] = call.trace_id
        fields |= ended | ({"reason": reason} if reason else {}) | self._figures(records)
        self._logger.info(message, extra={"fields": fields})

    def _figures(self, records: Sequence[RequestRecord]) -> dict[str, Any]:
        """The engine's figures of a call; empty without a request to the engine."""
        if not records:
            return {}
        started = [record.started for record in records if record.started is not None]
        finished = [end for record in records for end in record.finished]
        times = [record.ttft_s for record in records if record.ttft_s is not None]
        found: dict[str, Any] = {
            "request": ",".join([record.request.request_id for record in records[:MAX_LOGGED_IDS]]),
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
            found["output"] = "\n".join("".join(text) for record in records for _, text in sorted(record.texts.items()))
        return found


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
