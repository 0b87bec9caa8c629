"""An engine client whose engine is the test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.admission import Admission
from server.auth.principal import Limits, Principal
from server.engine_client import RequestTable
from server.errors import pack_error
from server.ipc import Frame
from server.request_stream import RequestStream
from specdec.config import ServerConfig
from specdec.core.types import (
    Delta,
    EngineInfo,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    Timings,
    Usage,
)
from specdec.errors import EngineDeadError, RequestError
from tests.fake_engine import INFO


class StubClient:
    """The part of `EngineClient` that `Admission` uses, over the real request table. ``given`` and ``aborted`` record
    the calls."""

    def __init__(self, max_batch: int = 4) -> None:
        self.info: EngineInfo = replace(INFO, max_batch=max_batch)
        self.given: list[Request] = []
        self.aborted: list[str] = []
        self.dead = False
        self._table = RequestTable(self._send)
        self._engine_ids: dict[str, str] = {}  # by request id, of the last submission

    def generate(self, request: Request) -> RequestStream:
        if self.dead:
            raise EngineDeadError
        stream = self._table.submit(request)
        self.given.append(request)
        return stream

    def abort(self, request_id: str) -> bool:
        """Like the engine: each open sample ends with its output."""
        found = self._table.abort(request_id)
        if found:
            request = next(r for r in self.given if r.request_id == request_id)
            for index in range(request.sampling.n):
                self.say(finished(request, 0, FinishReason.ABORTED, index))
        return found

    def say(self, event: RequestEvent) -> None:
        """Report an event of the engine for the request with the given id."""
        event.request_id = self._engine_ids[event.request_id]
        self._table.deliver(event)

    def refuse(self, request_id: str, error: RequestError) -> None:
        """The engine does not take a request."""
        self.say(Failed(request_id, *pack_error(error)))

    @property
    def in_flight(self) -> int:
        return len(self._table)

    def _send(self, kind: Frame, *parts: Any) -> None:
        if kind is Frame.SUBMIT:
            engine_id = parts[0].request_id
            self._engine_ids[engine_id.partition(":")[2]] = engine_id
        else:
            self.aborted.append(parts[0].partition(":")[2])


class Clock:
    """A clock in seconds that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(client: StubClient, clock: Clock | None = None, **config: Any) -> Admission:
    return Admission(client, ServerConfig(**config), clock or Clock())  # type: ignore[arg-type]


def principal(name: str = "a", tenant: str = "t", **limits: Any) -> Principal:
    return Principal(name, tenant, Limits(**limits))


def started(request: Request) -> Started:
    return Started(request.request_id, 1, len(request.prompt_ids), 0, 0.0)


def delta(request: Request, tokens: int) -> Delta:
    return Delta(request.request_id, 0, [1] * tokens, "x" * tokens)


def finished(
    request: Request,
    outputs: int,
    reason: FinishReason = FinishReason.EOS,
    index: int = 0,
    prefill_ms: float = 0.0,
    decode_ms: float = 0.0,
    cached: int = 0,
    resumed: int = 0,
) -> Finished:
    return Finished(
        request.request_id, index, reason, None,
        Usage(len(request.prompt_ids), cached, outputs, resumed_tokens=resumed), SpeculationStats(),
        Timings(prefill_ms=prefill_ms, decode_ms=decode_ms),
    )  # fmt: skip
