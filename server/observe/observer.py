"""Makes the records of calls and requests, and tells metrics, spans, logs and captures of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from server.auth.principal import current_caller
from server.observe.capture import Capture
from server.observe.logs import CallLog, PromptText
from server.observe.metrics import ServerMetrics
from server.observe.records import CallRecord, RequestRecord, TelemetryListener, current_call
from specdec.config import ServerConfig
from specdec.core.types import Request
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


class Observer:
    """One per server, or per model of several. ``listeners`` hear of everything after ``metrics`` have; one that fails
    costs no request.

    ``keeps_text``: records hold the output's text, for listeners that are to tell it. ``metrics`` None: fresh ones.
    ``model``: whose requests it hears of.
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
        """One for the requests of a model of several: counted by themselves, and told to the same listeners."""
        metrics = ServerMetrics(target_tpot_ms)
        return Observer(self._listeners[1:], keeps_text=self._keeps_text, metrics=metrics, model=model)

    def request(self, request: Request) -> RequestRecord:
        """The record of a request that is given to the engine now."""
        call = current_call()
        record = RequestRecord(
            request, call, self.metrics, self._request_ended, keeps_text=self._keeps_text, model=self._model
        )
        if call is not None:
            _name_caller(call)
            if not call.many:
                call.requests.append(record)
        return record

    def begin_call(
        self, protocol: str, endpoint: str, request_id: str, trace_headers: dict[str, str], *, many: bool = False
    ) -> CallRecord:
        """The record of a call that comes in now; `end_call` ends it."""
        call = CallRecord(protocol, endpoint, request_id, time.monotonic(), time.time(), many, trace_headers)
        self._tell(lambda listener: listener.call_began(call))
        return call

    def end_call(self, call: CallRecord, status: str) -> None:
        """The call is over."""
        call.status, call.ended_s = status, time.monotonic()
        _name_caller(call)
        self._tell(lambda listener: listener.call_ended(call))

    def close(self) -> None:
        """Hand over what listeners hold back. May wait for the network."""
        self._tell(lambda listener: listener.close())

    def _request_ended(self, record: RequestRecord) -> None:
        self._tell(lambda listener: listener.request_ended(record))

    def _tell(self, what: Callable[[TelemetryListener], None]) -> None:
        for listener in self._listeners:
            try:
                what(listener)
            except Exception:
                _LOG.exception("%s failed; what it was told is lost", type(listener).__name__)


def _name_caller(call: CallRecord) -> None:
    caller = current_caller()
    call.key, call.tenant = caller.name, caller.tenant


def build_observer(config: ServerConfig, prompt_text: PromptText, target_tpot_ms: float) -> Observer:
    """An observer with a log of calls, traces and captured requests, as asked for. prompt_text: for logs that tell it.
    target_tpot_ms: as `ServerMetrics` has it.

    Raises:
        ConfigError: traces are asked for, and what they need is not installed; or requests are to be captured where
            nothing can be written.
    """
    listeners: list[TelemetryListener] = []
    if config.otlp_endpoint is not None:
        # Before the log, whose lines name the trace.
        listeners.append(_spans(config.otlp_endpoint, config.trace_ratio))
    if config.log_calls:
        listeners.append(CallLog(prompt_text if config.log_texts else None))
    if config.capture_dir is not None:
        listeners.append(Capture(config.capture_dir, prompts=config.capture_prompts))
    return Observer(listeners, keeps_text=config.log_texts, metrics=ServerMetrics(target_tpot_ms))


def _spans(endpoint: str, ratio: float) -> TelemetryListener:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from server.observe.spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint: traces need packages that are not here ({error.name}); "
            "install them with: pip install 'specdec[otel]', or leave otlp_endpoint out"
        ) from None
    return Spans(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")), ratio)
