"""What is known of one request to the engine, gathered from its events as they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.telemetry.sample_record import SampleRecord
from specdec.errors import RequestError
from specdec.types import Delta, Finished, Request, RequestEvent, Started

if TYPE_CHECKING:
    from server.metrics.server_metrics import ServerMetrics
    from server.telemetry.call_record import CallRecord
    from server.telemetry.request_watcher import RequestWatcher


class RequestRecord:
    """Fed by the request's stream, whether or not anybody reads that: takes microseconds an event.

    Times are monotonic seconds. ``began_s``: when its call came in, or it was made where the call makes many.
    ``started`` None: the engine has not said a word. ``text`` is kept only where ``keeps_text`` says so. ``arms``: the
    experiments that count it, each with its arm.
    """

    def __init__(
        self,
        request: Request,
        call: CallRecord | None,
        metrics: ServerMetrics,
        on_end: Callable[[RequestRecord], None],
        *,
        keeps_text: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request, self.call = request, call
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
