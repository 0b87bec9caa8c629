"""Calls of the engine process: requests and their streams, operators' commands, reads of its trace."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from server.engine_process import FLUSH_CACHE, SWAP_DRAFT, TRACE
from server.engine_supervisor import EngineSupervisor
from server.errors import PoisonRequestError, unpack_error
from server.ipc import Frame, unpack, unpack_event
from server.observe.observer import Observer
from server.request_stream import RequestStream, UnreadEvents
from specdec.config import EngineConfig, WeightDtype
from specdec.core.types import (
    MAX_QUEUED_REQUESTS,
    EngineInfo,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    StepTrace,
    unstarted,
)
from specdec.errors import UNAVAILABLE_RETRY_S, DuplicateRequestError, EngineDeadError, QueueFullError

_LOG = logging.getLogger(__name__)

MAX_SUSPECTS = 1024  # digests that are remembered
_POISONOUS_DEATHS = 2  # deaths of the engine with a request in flight after which the request is refused


class Suspects:
    """Requests that were in flight when the engine died, by a digest of what stays the same when one comes again; the
    oldest are forgotten.

    A request that comes again after one such death runs alone, so that only the guilty one can stop the engine with it
    in flight once more. After `_POISONOUS_DEATHS` it is refused. A request that completes is forgotten.
    """

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def died(self, requests: Iterable[Request]) -> None:
        """Note that the engine died with ``requests`` in flight. Equal ones count once."""
        for digest in dict.fromkeys(map(_digest, requests)):
            self._deaths[digest] = self._deaths.pop(digest, 0) + 1
        while len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)

    def completed(self, request: Request) -> None:
        """Forget ``request``."""
        if self._deaths:
            self._deaths.pop(_digest(request), None)

    def must_run_alone(self, request: Request) -> bool:
        """Whether the engine died once with ``request`` in flight.

        Raises:
            PoisonRequestError: it died more often.
        """
        deaths = self._deaths.get(_digest(request), 0) if self._deaths else 0
        if deaths >= _POISONOUS_DEATHS:
            raise PoisonRequestError
        return deaths > 0


def _digest(request: Request) -> bytes:
    """Of all but its id, its time limits, and the fields in which a resumed stream differs from the whole one."""
    stopping = replace(request.stopping, time_limit_s=None, decode_limit_s=None)
    sampling = replace(request.sampling, seed=None, n=1)
    same = replace(request, request_id="", deadline_s=None, resume=None, stopping=stopping, sampling=sampling)
    return blake2b(repr(same).encode(), digest_size=16).digest()


# Ends from outside. Such a request may still be harmful: it may not have reached the step that stops the engine.
_CUT_SHORT = (FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.TIME_LIMIT)
_NOT_SENT = "the engine stopped before it got this request; retry shortly"


@dataclass(slots=True)
class _Submission:
    """A request until the engine has ended it, even if its reader has gone."""

    engine_id: str
    stream: RequestStream
    alone: bool  # nothing may run beside it
    came_s: float  # monotonic seconds
    samples_left: int  # that the engine has not ended
    cut_short: bool = False  # a sample was


class RequestTable:
    """Sends requests to the engine in order; a suspect is sent when nothing else runs, and nothing else beside it.

    The engine gets an id that is fresh for each submission: a caller may reuse a request id right after cancelling,
    while events of the former request are still under way. What was sent runs until the engine has ended it, even if
    its reader has gone: a request that hangs the engine is still the one to blame then.
    """

    def __init__(self, send: Callable[..., None], observer: Observer | None = None) -> None:
        """send: sends a frame to the engine. observer: records every request."""
        self._send, self._observer = send, observer or Observer()
        self._suspects = Suspects()
        self._open: dict[str, _Submission] = {}  # by request id; their readers have not gone
        self._waiting: OrderedDict[str, _Submission] = OrderedDict()  # by engine id; they were not sent
        self._running: dict[str, _Submission] = {}  # by engine id
        self._alone = False  # whether the last one sent may have none beside it
        self._numbers = itertools.count(1)
        self._unread = UnreadEvents()

    def __len__(self) -> int:
        """Requests that have not ended, and whose readers have not gone."""
        return len(self._open)

    def submit(self, request: Request) -> RequestStream:
        """Send ``request``, now or later, and return its stream.

        Raises:
            DuplicateRequestError: its id is in flight.
            PoisonRequestError: the engine died twice with the same request in flight.
            QueueFullError: too many requests wait for a suspect that runs alone.
        """
        request_id = request.request_id
        alone = self._suspects.must_run_alone(request)
        if len(self._waiting) >= MAX_QUEUED_REQUESTS:
            raise QueueFullError(MAX_QUEUED_REQUESTS, UNAVAILABLE_RETRY_S)
        if request_id in self._open:
            raise DuplicateRequestError(f"request_id {request_id!r} is in flight; choose another")

        def on_end(complete: bool) -> None:
            del self._open[request_id]
            if not complete:
                self._abort(entry)

        record = self._observer.request(request)  # before it is sent, as its times begin here
        stream, engine_id = RequestStream(request, on_end, record, self._unread), f"{next(self._numbers)}:{request_id}"
        entry = _Submission(engine_id, stream, alone, time.monotonic(), request.sampling.n)
        self._open[request_id] = self._waiting[engine_id] = entry
        self._send_next()
        if engine_id in self._waiting:
            self._limit_wait(entry)
        return stream

    def abort(self, request_id: str) -> bool:
        """End a request: its reader gets Finished(ABORTED) per open sample. False when it is not in flight."""
        entry = self._open.get(request_id)
        if entry is not None and not self._end_unsent(entry.engine_id, FinishReason.ABORTED):
            self._abort(entry)
        return entry is not None

    def deliver(self, event: RequestEvent) -> None:
        """Take an event of the engine, and pass it to the request's stream."""
        entry = self._running.get(event.request_id)
        if entry is None:
            return  # the engine's last events before it was lost
        if isinstance(event, Finished):
            entry.samples_left -= 1
            entry.cut_short = entry.cut_short or event.reason in _CUT_SHORT
            if entry.samples_left == 0 and not entry.cut_short:
                self._suspects.completed(entry.stream.request)
        if entry.samples_left == 0 or isinstance(event, Failed):
            del self._running[entry.engine_id]
            self._send_next()
        entry.stream.push(event)  # last: it sets the event's id to the caller's

    def fail_all(self, error: EngineDeadError) -> None:
        """End every request with ``error``, in the engine too."""
        for entry in self._open.values():
            self._abort(entry)
        self._fail(list(self._open.values()), error)

    def lost(self, error: EngineDeadError, *, died: bool) -> None:
        """End every request with ``error``, since the engine is lost. If it died, the requests that were running become
        suspects, and those that were not sent end with an error that does not count the death against them."""
        waiting, running = self._waiting, self._running
        self._waiting, self._running = OrderedDict(), {}
        if died:
            self._suspects.died(entry.stream.request for entry in running.values())
            self._fail(waiting.values(), EngineDeadError(_NOT_SENT, error.retry_after_s))
        self._fail(list(self._open.values()), error)

    def _fail(self, entries: Collection[_Submission], error: EngineDeadError) -> None:
        if entries:
            _LOG.warning("%d requests in flight end: %s", len(entries), error)
        for entry in entries:
            entry.stream.fail(error)

    def _limit_wait(self, entry: _Submission) -> None:
        """Let the request's deadline and time limit end it while it waits; the engine does once it is sent."""
        request = entry.stream.request
        limits = (request.deadline_s, FinishReason.DEADLINE), (request.stopping.time_limit_s, FinishReason.TIME_LIMIT)
        for limit_s, reason in limits:
            if limit_s is not None:
                asyncio.get_running_loop().call_later(limit_s, self._end_unsent, entry.engine_id, reason)

    def _end_unsent(self, engine_id: str, reason: FinishReason) -> bool:
        """End a request as the engine would, unless it was sent; returns whether it was not."""
        entry = self._waiting.pop(engine_id, None)
        if entry is None:
            return False
        waited_ms = (time.monotonic() - entry.came_s) * 1e3
        for event in unstarted(engine_id, entry.stream.request, reason, waited_ms):
            entry.stream.push(event)
        self._send_next()
        return True

    def _abort(self, entry: _Submission) -> None:
        """Forget a request that was not sent, and let the engine end another."""
        if self._waiting.pop(entry.engine_id, None) is None:
            self._send(Frame.ABORT, entry.engine_id)
        else:
            self._send_next()

    def _send_next(self) -> None:
        while self._waiting:
            entry = next(iter(self._waiting.values()))
            if self._running and (entry.alone or self._alone):
                return
            del self._waiting[entry.engine_id]
            self._running[entry.engine_id] = entry
            self._alone = entry.alone
            request = replace(entry.stream.request, request_id=entry.engine_id)
            self._send(Frame.SUBMIT, request, time.monotonic() - entry.came_s)


DEFAULT_TRACE_STEPS = 50
MAX_TRACE_STEPS = 1024
TRACE_LIMIT_RULE = f"must lie in 1..{MAX_TRACE_STEPS}"


class EngineClient:
    """Submits requests and commands to the process that ``engine`` runs. Belongs to one event loop."""

    def __init__(self, engine: EngineSupervisor, observer: Observer | None = None) -> None:
        """observer: records every request."""
        self.engine = engine
        self._table = RequestTable(engine.send, observer)
        self._calls: dict[int, asyncio.Future[Any]] = {}  # answers under way, by the call's number
        self._numbers = itertools.count(1)
        engine.listener = self

    @property
    def info(self) -> EngineInfo:
        """The engine's description; raises EngineDeadError until it is first ready."""
        return self.engine.info

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._table)

    @property
    def draft_setting(self) -> tuple[str | None, WeightDtype | None]:
        """The draft model in use and its type, as `swap_draft` takes them."""
        return self.engine.config.draft, self.engine.config.draft_dtype

    def generate(self, request: Request) -> RequestStream:
        """Submit ``request`` and return its events; leave the stream's ``async with`` to abort it.

        Raises:
            EngineDeadError: the engine is not ready.
            DuplicateRequestError: the id is in flight.
            PoisonRequestError: the engine died twice with the same request in flight.
            QueueFullError: too many requests wait for a suspect that runs alone; the engine bounds those that it has.
        """
        self.engine.check_ready()
        return self._table.submit(request)

    def abort(self, request_id: str) -> bool:
        """End a request: its reader gets Finished(ABORTED) per open sample. False when it is not in flight."""
        return self._table.abort(request_id)

    def fail_all(self, error: EngineDeadError) -> None:
        """End every request in flight with ``error``, in the engine too."""
        self._table.fail_all(error)

    async def trace(self, limit: int) -> list[StepTrace]:
        """The engine's last ``limit`` steps, newest last; waits for the running step.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            GenerationFailedError: the engine failed to report its trace.
        """
        return [unpack(StepTrace, step) for step in await self._call(TRACE, limit)]

    async def flush_cache(self) -> int:
        """Drop the cached prefixes that no running request uses; returns the number of pages freed.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            RequestError: the engine could not do it.
        """
        return int(await self._call(FLUSH_CACHE))

    async def swap_draft(self, draft: str | None, dtype: WeightDtype | None = None) -> EngineInfo:
        """Draft with another model or feature head from now on, or with no model. An engine that restarts loads it
        too, or the configured one if it refuses this one. Cancelling the call does not end the swap.

        draft, dtype: as in the configuration, or a head's folder.

        Raises:
            DraftNotSwappedError: the model cannot be loaded or does not fit; the old one is still in place.
            SwapUnderWayError: another one is being loaded.
            EngineDeadError: the engine is not ready, or ends before it answers.
        """
        swapping = asyncio.create_task(self._swap_draft(draft, dtype))
        swapping.add_done_callback(lambda swap: swap.cancelled() or swap.exception())  # its caller may have left
        return await asyncio.shield(swapping)

    async def _swap_draft(self, draft: str | None, dtype: WeightDtype | None) -> EngineInfo:
        info = unpack(EngineInfo, await self._call(SWAP_DRAFT, draft, dtype))
        config = self.engine.config
        is_head = draft is not None and draft == info.head
        head = config.model_copy(update={"draft_head": draft})
        self.engine.adopt(info, head if is_head else _with_draft(config, draft, dtype))
        return info

    def on_frame(self, frame: list[Any]) -> None:
        """As `EngineListener.on_frame`."""
        kind, *rest = frame
        if kind != Frame.ADMIN:
            for parts in rest[0]:  # `EVENTS`
                self._table.deliver(unpack_event(parts))
            return
        number, error, result = rest
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return  # its caller has gone
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(unpack_error(error))

    def on_lost(self, error: EngineDeadError, *, died: bool = False) -> None:
        """End every request and call with ``error``."""
        self._table.lost(error, died=died)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)

    async def _call(self, command: str, *args: Any) -> Any:
        self.engine.check_ready()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self.engine.send(Frame.ADMIN, number, command, args)
            return await answer
        finally:
            del self._calls[number]


def _with_draft(config: EngineConfig, draft: str | None, dtype: WeightDtype | None) -> EngineConfig:
    """``config`` of an engine that drafts with another model, or with none."""
    drafters = tuple(name for name in config.drafters if name != "model") + (("model",) if draft is not None else ())
    speculation = config.speculation.model_copy(update={"drafters": drafters})
    return config.model_copy(update={"draft": draft, "draft_dtype": dtype, "speculation": speculation})
