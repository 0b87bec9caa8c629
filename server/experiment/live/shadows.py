"""Mode `shadow`: copies of requests that run with the treatment's options; their answers are discarded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from server.engine_client import EngineClient
from server.experiment.live.recording import Participation
from server.experiment.records import Choice
from server.observe.metrics import ServerMetrics
from server.observe.records import RequestRecord
from server.request_stream import RequestStream
from specdec.core.types import FinishReason, Request
from specdec.errors import RequestError

_LOWEST = -((1 << 31) - 1)
Observed = tuple[Participation, RequestRecord]


@dataclass(eq=False, slots=True)
class _Pair:
    request: Request  # the shadow's
    real: Observed | None = None  # once it has ended
    shadow: Observed | None = None  # once it has ended
    stream: RequestStream | None = None
    over: bool = False


class Shadows:
    """A shadow has the lowest priority, is sent only if the engine has free slots for its samples, and is cancelled
    when a real request needs them. It counts against no caller's limits, and appears in no metric, log or trace of
    calls.

    ``write`` gets both halves of a pair when both have ended. If one was cancelled, neither is written. Belongs to one
    event loop.
    """

    def __init__(
        self, client: EngineClient, arm: str, write: Callable[[Observed, Observed], None], *, beside: bool
    ) -> None:
        self._client, self._arm, self._write, self._beside = client, arm, write, beside
        self._metrics = ServerMetrics()
        self._pairs: dict[str, _Pair] = {}
        self.given_up = 0

    @property
    def running(self) -> int:
        return sum(pair.stream is not None for pair in self._pairs.values())

    def begin(self, real: Participation, request: Request) -> None:
        """``real`` was admitted; ``request``: its copy for the treatment."""
        name = f"{request.request_id}~{real.name}"
        pair = _Pair(dataclasses.replace(request, request_id=name, priority=_LOWEST))
        self._pairs[real.name] = pair
        if self._beside:
            self._send_soon(real, pair)

    def real_ended(self, real: Participation, seen: RequestRecord) -> None:
        """`Participation` calls it at the end of a real request."""
        pair = self._pairs.get(real.name)
        if pair is None:
            return
        pair.real = (real, seen)
        if _was_cut(seen):
            self._drop(real.name)
        elif self._beside:
            self._settle(real.name)
        else:
            self._send_soon(real, pair)

    def make_room(self, samples: int) -> None:
        """A real request of ``samples`` samples arrives: cancel shadows until each has a slot."""
        for name in reversed(list(self._pairs)):
            if self._has_room(samples):
                return
            if self._pairs[name].stream is not None:
                self.given_up += 1
                self._drop(name)

    def close(self) -> None:
        for name in list(self._pairs):
            self._drop(name)

    def _has_room(self, samples: int) -> bool:
        return self._client.samples_left + samples <= self._client.info.max_batch

    def _send_soon(self, real: Participation, pair: _Pair) -> None:
        """Send after the event loop has served the readers of the real request."""
        asyncio.get_running_loop().call_soon(self._send, real, pair)

    def _send(self, real: Participation, pair: _Pair) -> None:
        if pair.over:
            return
        if not self._has_room(pair.request.sampling.n):
            self.given_up += 1
            self._drop(real.name)
            return
        choice = Choice(self._arm, real.choice.key)
        part = Participation(
            f"{real.name}s", choice, lambda: self._client.in_flight, self._shadow_ended(real), keeps_tokens=True
        )
        record = RequestRecord(pair.request, None, self._metrics, lambda _: None)
        record.watchers = (part,)
        try:
            pair.stream = self._client.generate(pair.request, record)
        except RequestError:  # the engine is not ready
            self._drop(real.name)
        else:
            pair.stream.discard()

    def _shadow_ended(self, real: Participation) -> Callable[[Participation, RequestRecord], None]:
        def ended(part: Participation, seen: RequestRecord) -> None:
            pair = self._pairs.get(real.name)
            if pair is None:
                return
            pair.stream, pair.shadow = None, (part, seen)
            if _was_cut(seen):
                self._drop(real.name)
            else:
                self._settle(real.name)

        return ended

    def _settle(self, name: str) -> None:
        pair = self._pairs[name]
        if pair.real is not None and pair.shadow is not None:
            self._drop(name)
            self._write(pair.real, pair.shadow)

    def _drop(self, name: str) -> None:
        pair = self._pairs.pop(name, None)
        if pair is not None:
            pair.over = True
            if pair.stream is not None:
                pair.stream.close()


def _was_cut(seen: RequestRecord) -> bool:
    """Whether the request was cancelled before its end."""
    return not seen.complete or any(end.reason is FinishReason.ABORTED for end in seen.finished)
