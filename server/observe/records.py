"""Records of calls and requests in progress, and the current call."""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.core.types import Delta, Finished, Request, RequestEvent, Started
from specdec.errors import MAX_ENGINES_STOPPED, RequestError

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class SampleRecord:
    first_s: float  # monotonic seconds of the first tokens
    last_s: float  # and of the latest
    tokens: int = 0
    finished: Finished | None = None  # None: the sample has not ended

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first; None with fewer than two tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class RequestMetrics(Protocol):
    """Counters of events of a running request."""

    def prompt(self, event: Started) -> None:
        """The request was scheduled."""

    def first_tokens(self, ttft_s: float) -> None:
        """The first tokens arrived."""

    def tokens(self, count: int, gap_s: float | None = None) -> None:
        """A sample's next ``count`` tokens arrived, ``gap_s`` after the previous ones; None: its first."""

    def sample_finished(self, sample: SampleRecord, event: Finished) -> None:
        """A sample ended."""


class RequestRecord:
    """The history of one request, fed by its stream whether or not it is read. Times are monotonic seconds. keeps_text:
    keep the output's text. model: the model that answers, on a server of several."""

    def __init__(
        self,
        request: Request,
        call: CallRecord | None,
        metrics: RequestMetrics,
        on_end: Callable[[RequestRecord], None],
        *,
        keeps_text: bool = False,
        clock: Callable[[], float] = time.monotonic,
        model: str = "",
    ) -> None:
        self.request, self.call, self.model = request, call, model
        self._metrics, self._keeps_text, self._clock = metrics, keeps_text, clock
        self.made_s = clock()
        # Arrival of the call; of its later requests, which may wait for earlier ones, creation of the request.
        self.began_s = self.made_s if call is None or call.many or call.requests else call.began_s
        self.started: Started | None = None  # None: the engine has sent no event
        self.first_s: float | None = None
        self.ended_s = 0.0
        self.samples: dict[int, SampleRecord] = {}
        self.error: RequestError | None = None  # the engine refused the request, or it broke off
        self.complete = False
        self.texts: defaultdict[int, list[str]] = defaultdict(list)  # pieces of each sample's text
        # Called once, with the complete record, in the event loop; must be quick and must not raise
        self.when_ended: tuple[Callable[[RequestRecord], None], ...] = (on_end,)

    @property
    def finished(self) -> list[Finished]:
        """The last events of the samples that ended."""
        return [sample.finished for sample in self.samples.values() if sample.finished is not None]

    @property
    def output_tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples.values())

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self.first_s is None else self.first_s - self.began_s

    def saw(self, event: RequestEvent) -> None:
        if isinstance(event, Delta):
            self._tokens(event)
        elif isinstance(event, Started):
            self.started = event
            self._metrics.prompt(event)
        elif isinstance(event, Finished):
            now = self._clock()
            sample = self.samples.setdefault(event.index, SampleRecord(now, now))
            sample.finished = event
            self._metrics.sample_finished(sample, event)

    def ended(self, complete: bool) -> None:
        """Close the record. ``complete`` False: the reader left before the end."""
        self.complete, self.ended_s = complete, self._clock()
        for call in self.when_ended:
            call(self)

    def _tokens(self, event: Delta) -> None:
        if self._keeps_text:
            self.texts[event.index].append(event.text)
        count = len(event.token_ids)
        if not count:
            return
        now = self._clock()
        sample = self.samples.get(event.index)
        if sample is None:
            self.samples[event.index] = SampleRecord(now, now, count)
            if self.first_s is None:
                self.first_s = now
                self._metrics.first_tokens(now - self.began_s)
            self._metrics.tokens(count)
        else:
            self._metrics.tokens(count, now - sample.last_s)
            sample.last_s = now
            sample.tokens += count


REQUEST_ID_HEADER = "x-request-id"
"""The header with a call's id, in requests and answers."""

MAX_ID_CHARACTERS = 100

ATTEMPT_HEADER = "x-envoy-attempt-count"  # of a request, by Envoy: 1, 2, ...
NO_RETRY_HEADER = "x-envoy-ratelimited"  # Envoy does not retry an answer with this header
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers of the W3C trace context."""

ARM_HEADER = "x-specdec-arm"
"""The header in which callers request arms of experiments, and that reports the arms they got."""


def call_id(given: str) -> str:
    """The id of a call: ``given`` by its caller, truncated, or a fresh one."""
    return given[:MAX_ID_CHARACTERS] or uuid.uuid4().hex


@dataclass(slots=True, eq=False)
class CallRecord:
    protocol: str  # `http` or `grpc`
    endpoint: str  # path or method
    request_id: str
    began_s: float  # monotonic seconds
    at_s: float  # Unix time of the beginning
    many: bool = False  # a session with any number of requests, which `requests` does not hold
    trace_headers: dict[str, str] = field(default_factory=dict)  # W3C trace context of the caller
    attempt: int = 1  # counted by a router that retries
    span: Any = None  # OpenTelemetry's, with tracing
    trace_id: str = ""  # empty without tracing
    ended_s: float = 0.0  # monotonic seconds
    status: str = ""  # HTTP's number or gRPC's name
    reason: str = ""  # machine-readable cause of a refusal or a broken answer
    key: str = ""
    tenant: str = ""
    arm_asked: str = ""  # arms that the caller requests, as in `ARM_HEADER`
    arm: str = ""  # arms that the call got, as in `ARM_HEADER`
    requests: list[RequestRecord] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s


class TelemetryListener:
    """Called once per event, in the event loop, so methods must be quick and never block; except `close`, which runs in
    a thread."""

    def call_began(self, call: CallRecord) -> None:
        """A call arrived."""

    def request_ended(self, record: RequestRecord) -> None:
        """A request ended, or its reader left."""

    def call_ended(self, call: CallRecord) -> None:
        """A call was answered or refused, or its client left."""

    def close(self) -> None:
        """The server ends: flush. Called again where a stop was broken off."""

    def hurry(self) -> None:
        """The server ends at once: a `close` that runs, or comes, does not wait for the network."""


CALL: ContextVar[CallRecord | None] = ContextVar("call", default=None)


def current_call() -> CallRecord | None:
    """The current call; None outside of one."""
    return CALL.get()


def note_refusal(error: Exception) -> None:
    """Note that the current call is refused, or breaks off, with ``error``; logs a fault of the server."""
    call, place = CALL.get(), "a call"
    if call is not None:
        call.reason = error.reason if isinstance(error, RequestError) else "INTERNAL"
        place = f"{call.endpoint}, request {call.request_id}"
    if not isinstance(error, RequestError):
        _LOG.error("unexpected error in %s", place, exc_info=error)
    elif error.http_status == 500:
        _LOG.error("request failed: %s: %s", error.reason, error)


def current_arm() -> str:
    """The experiment arms of the current call, as in `CallRecord.arm`."""
    call = CALL.get()
    return "" if call is None else call.arm


def attempt_of(value: str) -> int:
    """The number of an attempt, from `ATTEMPT_HEADER`; 1 if it is missing or malformed."""
    return int(value) if value.isascii() and value.isdigit() and len(value) < 6 else 1


def engines_stopped(error: RequestError) -> int:
    """Engines that stopped while the current call ran. If a router has retried it, another one did before."""
    call = current_call()
    retried = call is not None and call.attempt > 1
    return error.engines_stopped + int(retried and error.engines_stopped > 0)


def forbids_retry(error: RequestError) -> bool:
    """Whether the answer to the current call gets `NO_RETRY_HEADER`, because it may stop no more engines."""
    return engines_stopped(error) >= MAX_ENGINES_STOPPED
