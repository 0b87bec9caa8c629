"""Makes the records of requests and calls, and tells listeners of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from server.auth.caller import current_caller
from server.metrics.server_metrics import ServerMetrics
from server.telemetry.call_record import CallRecord
from server.telemetry.current_call import current_call
from server.telemetry.listener import TelemetryListener
from server.telemetry.request_record import RequestRecord
from specdec.types import Request

_LOG = logging.getLogger(__name__)
TRACE_HEADERS = ("traceparent", "tracestate")


class Observer:
    """One per server. ``listeners`` hear of everything after ``metrics`` have; one that fails costs no request.

    ``keeps_text``: records hold the output's text, for listeners that are to tell it.
    """

    def __init__(self, listeners: Sequence[TelemetryListener] = (), *, keeps_text: bool = False) -> None:
        self.metrics = ServerMetrics()
        self._listeners: list[TelemetryListener] = [self.metrics, *listeners]
        self._keeps_text = keeps_text

    def request(self, request: Request) -> RequestRecord:
        """The record of a request that is given to the engine now."""
        call = current_call()
        record = RequestRecord(request, call, self.metrics, self._request_ended, keeps_text=self._keeps_text)
        if call is not None:
            _name_caller(call)
            if not call.many:
                call.requests.append(record)
        return record

    def begin_call(
        self, face: str, endpoint: str, request_id: str, trace_headers: dict[str, str], *, many: bool = False
    ) -> CallRecord:
        """The record of a call that comes in now; `end_call` ends it."""
        call = CallRecord(face, endpoint, request_id, time.monotonic(), time.time(), many, trace_headers)
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
