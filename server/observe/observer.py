"""Creates the records of calls and requests, and publishes them to metrics, spans, logs and captures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from server.auth.principal import current_caller
from server.observe.capture import Capture
from server.observe.logs import CallLog, PromptText
from server.observe.metrics import ServerMetrics
from server.observe.records import (
    ARM_HEADER,
    ATTEMPT_HEADER,
    CALL,
    REQUEST_ID_HEADER,
    TRACE_HEADERS,
    CallRecord,
    RequestRecord,
    TelemetryListener,
    attempt_of,
    call_id,
    current_call,
)
from specdec.config import ServerConfig
from specdec.core.types import Request
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


class Observer:
    """One per server, or per model of several. ``listeners`` are called after ``metrics``; their exceptions are logged
    and do not affect requests.

    keeps_text: records hold the output's text, for listeners that log it. model: name of the model whose requests it
    records; empty on a server of one.
    """

    def __init__(
        self,
        listeners: Sequence[TelemetryListener] = (),
        *,
        keeps_text: bool = False,
        metrics: ServerMetrics | None = None,
        model: str = "",
    ) -> None:
        self.metrics = metrics or ServerMetrics()
        self._listeners: list[TelemetryListener] = [self.metrics, *listeners]
        self._keeps_text, self._model = keeps_text, model

    def of_model(self, model: str, target_tpot_ms: float) -> Observer:
        """An observer for one model of several: separate metrics, the same listeners."""
        metrics = ServerMetrics(target_tpot_ms)
        return Observer(self._listeners[1:], keeps_text=self._keeps_text, metrics=metrics, model=model)

    def request(self, request: Request) -> RequestRecord:
        """A record for a request that is submitted to the engine now."""
        call = current_call()
        record = RequestRecord(
            request, call, self.metrics, self._request_ended, keeps_text=self._keeps_text, model=self._model
        )
        if call is not None:
            _name_caller(call)
            if not call.many:
                call.requests.append(record)
        return record

    @contextmanager
    def call(
        self, protocol: str, endpoint: str, header: Callable[[str], str], *, many: bool = False
    ) -> Iterator[CallRecord]:
        """The record of a call that is answered in the block, which sets its ``status``. It is the current call of this
        task, and of those that begin in the block. header: returns a header, or "" if it is absent."""
        call = CallRecord(
            protocol, endpoint, call_id(header(REQUEST_ID_HEADER)), time.monotonic(), time.time(), many,
            trace_headers={name: value for name in TRACE_HEADERS if (value := header(name))},
            attempt=attempt_of(header(ATTEMPT_HEADER)),
            arm_asked=header(ARM_HEADER),
        )  # fmt: skip
        self._publish(lambda listener: listener.call_began(call))
        token = CALL.set(call)
        try:
            yield call
        finally:
            CALL.reset(token)
            call.ended_s = time.monotonic()
            _name_caller(call)
            self._publish(lambda listener: listener.call_ended(call))

    def close(self) -> None:
        """Flush the listeners. May wait for the network, unless `hurry` is called."""
        self._publish(lambda listener: listener.close())

    def hurry(self) -> None:
        """Let `close`, also one that runs, skip what waits for the network."""
        self._publish(lambda listener: listener.hurry())

    def _request_ended(self, record: RequestRecord) -> None:
        self._publish(lambda listener: listener.request_ended(record))

    def _publish(self, event: Callable[[TelemetryListener], None]) -> None:
        for listener in self._listeners:
            try:
                event(listener)
            except Exception:
                _LOG.exception("%s failed and missed an event", type(listener).__name__)


def _name_caller(call: CallRecord) -> None:
    caller = current_caller()
    call.key, call.tenant = caller.name, caller.tenant


def build_observer(config: ServerConfig, prompt_text: PromptText, target_tpot_ms: float) -> Observer:
    """An observer with the call log, spans and captures that ``config`` enables. prompt_text: the prompt of a request
    for the log. target_tpot_ms: as in `ServerMetrics`.

    Raises:
        ConfigError: packages for traces are missing, or the capture folder cannot be written.
    """
    metrics = ServerMetrics(target_tpot_ms)
    listeners: list[TelemetryListener] = []
    if config.otlp_endpoint is not None:
        # Before the log, whose lines include the trace id.
        listeners.append(_spans(config.otlp_endpoint))
    if config.log_calls:
        listeners.append(CallLog(prompt_text if config.log_texts else None))
    if config.capture_dir is not None:
        listeners.append(Capture(config.capture_dir, prompts=config.capture_prompts, file_errors=metrics.file_errors))
    return Observer(listeners, keeps_text=config.log_texts, metrics=metrics)


def _spans(endpoint: str) -> TelemetryListener:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from server.observe.spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint: traces need a package that is not installed ({error.name}); "
            "run pip install '.[otel]' in specdec's checkout, or leave otlp_endpoint out"
        ) from None
    return Spans(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")))
