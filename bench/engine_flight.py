"""A group of requests on its way through an engine, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bench.engine_bench_error import BenchError
from bench.engine_group_run import GroupRun
from bench.engine_request_run import RequestRun
from specdec.engine.engine import Engine
from specdec.types import Delta, Failed, Finished, Request, RequestEvent


class Flight:
    """Runs ``requests``, ``at_once`` of them at a time (None: all), the next one entering as one leaves. ``names`` are
    their prompts'. The engine runs nothing else.

    ``busy_s``: seconds spent in `Engine.step`. The clock runs only there: what a benchmark does between steps, even
    another engine's step, costs nobody anything.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Seq[Request],
        names: Seq[str],
        at_once: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._waiting, self._running = deque(requests), 0
        self._runs = {request.request_id: RequestRun(name) for request, name in zip(requests, names, strict=True)}
        self._first: dict[str, float] = {}
        self._places = min(len(requests), at_once or len(requests))
        self._full_s, self._full_tokens = 0.0, 0
        self.busy_s = 0.0

    @property
    def landed(self) -> bool:
        """Whether all of them have ended."""
        return not self._waiting and not self._engine.has_work()

    def step(self) -> None:
        """One step of the engine.

        Raises:
            BenchError: the engine failed a request.
            RequestError: it refused one.
        """
        while self._waiting and self._running < self._places:
            self._engine.submit(self._waiting.popleft())
            self._running += 1
        full = self._running == self._places
        began = self._clock()
        events = self._engine.step()
        took_s = self._clock() - began
        self.busy_s += took_s
        if full:
            self._full_s += took_s
            self._full_tokens += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        for event in events:
            self._running -= isinstance(event, Finished)
            self._take(self._runs[event.request_id], event)

    def result(self) -> GroupRun:
        """How it went, once all have landed."""
        return GroupRun(tuple(self._runs.values()), self.busy_s, self._full_s, self._full_tokens)

    def _take(self, run: RequestRun, event: RequestEvent) -> None:
        if isinstance(event, Failed):
            raise BenchError(f"{run.prompt}: the engine failed ({event.reason}: {event.message})")
        if isinstance(event, Delta):
            run.tokens += event.token_ids
            run.text += event.text
            if event.token_ids:
                if event.request_id not in self._first:
                    self._first[event.request_id], run.first_tokens = self.busy_s, len(event.token_ids)
                run.decode_s = self.busy_s - self._first[event.request_id]
        elif isinstance(event, Finished):
            run.reason, run.stats, run.usage = event.reason, event.stats, event.usage


def fly(flights: Seq[Flight]) -> None:
    """Bring all of ``flights`` home, each on an engine of its own. The next step is always that of the one that was
    busy for the least time so far: whatever the machine does meanwhile, it does to all of them.

    Raises:
        BenchError, RequestError: as `Flight.step`.
    """
    under_way = list(flights)
    while under_way := [flight for flight in under_way if not flight.landed]:
        min(under_way, key=lambda flight: flight.busy_s).step()
