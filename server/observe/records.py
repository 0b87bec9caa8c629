"""What is known of a call and of a request while they run, and which call runs now."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Protocol

from specdec.core.types import Delta, Finished, Request, RequestEvent, Started
from specdec.errors import RequestError


@dataclass(slots=True)
class SampleRecord:
    """Times are monotonic seconds of its first and latest tokens; ``finished`` None: it has not, or nobody heard."""

    first_s: float
    last_s: float
    tokens: int = 0
    finished: Finished | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first; None where there was no second."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


class RequestMetrics(Protocol):
    """What is counted of a request while it runs."""

    def prompt(self, event: Started) -> None:
        """A request was scheduled."""

    def first_tokens(self, ttft_s: float) -> None:
        """A request's first tokens are here."""

    def tokens(self, count: int, gap_s: float | None = None) -> None:
        """A sample's next ``count`` tokens came, ``gap_s`` after those before; None: its first."""

    def sample_finished(self, sample: SampleRecord, event: Finished) -> None:
        """A sample ended."""


class RequestWatcher(Protocol):
    """Told in the event loop, between the engine's word and its reader: must be quick, and must not raise."""

    def saw(self, event: RequestEvent) -> None:
        """The engine said something of it."""

    def ended(self, record: RequestRecord) -> None:
        """Nothing more comes; ``record`` is complete. Told once."""


class RequestRecord:
    """Fed by the request's stream, whether or not anybody reads that: takes microseconds an event.

    Times are monotonic seconds. ``began_s``: when its call came in, or it was made where the call makes many.
    ``model``: the one that answers, where a server has several. ``started`` None: the engine has not said a word.
    ``text`` is kept only where ``keeps_text`` says so. ``arms``: the experiments that count it, each with its arm.
    """

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
        self._metrics, self._on_end, self._keeps_text, self._clock = metrics, on_end, keeps_text, clock
        self.made_s = clock()
        self.began_s = self.made_s if call is None or call.many else call.began_s
        self.started: Started | None = None
        self.first_s: float | None = None
        self.ended_s = 0.0
        self.samples: dict[int, SampleRecord] = {}
        self.error: RequestError | None = None
        self.complete = False
        self.text: list[str] = []
        self.watchers: tuple[RequestWatcher, ...] = ()
        self.arms: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> list[Finished]:
        """How its samples ended, of those that did."""
        return [sample.finished for sample in self.samples.values() if sample.finished is not None]

    @property
    def output_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.tokens for sample in self.samples.values())

    @property
    def ttft_s(self) -> float | None:
        """From its beginning to its first token; None where none came."""
        return None if self.first_s is None else self.first_s - self.began_s

    def saw(self, event: RequestEvent) -> None:
        """The engine said something of it."""
        for watcher in self.watchers:
            watcher.saw(event)
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

    def failed(self, error: RequestError) -> None:
        """It was refused by the engine, or broke off."""
        self.error = error

    def ended(self, complete: bool) -> None:
        """Nothing more comes; ``complete`` False: its reader left before the end."""
        self.complete, self.ended_s = complete, self._clock()
        for watcher in self.watchers:
            watcher.ended(self)
        self._on_end(self)

    def _tokens(self, event: Delta) -> None:
        if self._keeps_text:
            self.text.append(event.text)
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
"""The header in which callers name a call, and are told its name."""

MAX_ID_CHARACTERS = 100

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C's trace context."""

ARM_HEADER = "x-specdec-arm"
"""The header in which callers ask for arms of experiments, and are told which they got."""


def call_id(given: str) -> str:
    """What a call is called whose caller named it ``given``: that, as far as it is not too long, or a fresh id."""
    return given[:MAX_ID_CHARACTERS] or uuid.uuid4().hex


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call from its first byte to its end. Times are in seconds: ``began_s`` and ``ended_s`` monotonic, ``at_s`` of
    the wall clock.

    ``protocol`` is `http` or `grpc`, ``endpoint`` a path or a method. ``many``: a session that makes requests without
    end, which are not kept here. ``status`` is HTTP's number or gRPC's name, ``reason`` the machine-readable cause of a
    refusal or of a broken answer, ``key`` and ``tenant`` whose call it is where that was asked. ``trace_headers`` are
    the W3C trace context that came with it, ``trace_id`` the trace it belongs to, where traces are made.
    ``arm_asked`` are the arms of experiments that the caller asks for, ``arm`` those it got, as in the header for them.
    """

    protocol: str
    endpoint: str
    request_id: str
    began_s: float
    at_s: float
    many: bool = False
    trace_headers: dict[str, str] = field(default_factory=dict)
    trace_id: str = ""
    ended_s: float = 0.0
    status: str = ""
    reason: str = ""
    key: str = ""
    tenant: str = ""
    arm_asked: str = ""
    arm: str = ""
    requests: list[RequestRecord] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s


class TelemetryListener:
    """Told once of each; what is not overridden is of no interest. What it does is done in the event loop, so it must
    be quick and never wait; but for `close`, which is called from a thread."""

    def call_began(self, call: CallRecord) -> None:
        """A call comes in."""

    def request_ended(self, record: RequestRecord) -> None:
        """The engine is done with a request, or its reader has left."""

    def call_ended(self, call: CallRecord) -> None:
        """A call was answered, refused, or its client has left."""

    def close(self) -> None:
        """The server ends: hand over what is held back."""


_CALL: ContextVar[CallRecord | None] = ContextVar("call", default=None)


def set_call(call: CallRecord) -> Token[CallRecord | None]:
    """For the rest of this task, and of those it starts; `leave_call` takes it back."""
    return _CALL.set(call)


def leave_call(token: Token[CallRecord | None]) -> None:
    """No call from now on, or the one before."""
    _CALL.reset(token)


def current_call() -> CallRecord | None:
    """The call; None outside of any."""
    return _CALL.get()


def note_refusal(error: Exception) -> None:
    """The call that runs now is refused, or breaks off, with ``error``."""
    call = _CALL.get()
    if call is not None:
        call.reason = error.reason if isinstance(error, RequestError) else "INTERNAL"


def current_arm() -> str:
    """The arms of experiments that the call got, as `CallRecord` has them; empty for none."""
    call = _CALL.get()
    return "" if call is None else call.arm
