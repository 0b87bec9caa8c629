"""Calls of the engine process: requests and their streams, operators' commands, reads of its trace."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from server.engine_process import FLUSH_CACHE, SWAP_DRAFT, TRACE
from server.engine_supervisor import EngineSupervisor
from server.errors import PoisonRequestError, unpack_error
from server.ipc import Frame, pack, unpack, unpack_event
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
from specdec.errors import UNAVAILABLE_RETRY_S, DuplicateRequestError, EngineDeadError, QueueFullError, RequestError

_LOG = logging.getLogger(__name__)


class RequestTable:
    """Streams by engine id and by request id.

    The engine gets an id that is fresh for each submission: a caller may reuse a request id right after cancelling,
    while events of the former request are still under way.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        """abort: ends a request in the engine."""
        self._abort = abort
        self._by_engine_id: dict[str, RequestStream] = {}
        self._engine_ids: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._unread = UnreadEvents()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def open(self, request: Request) -> tuple[str, RequestStream]:
        """An engine id and a stream for ``request``.

        Raises:
            DuplicateRequestError: its id is in flight.
        """
        request_id = request.request_id
        if request_id in self._engine_ids:
            raise DuplicateRequestError(f"request_id {request_id!r} is in flight; choose another")
        engine_id = f"{next(self._numbers)}:{request_id}"

        def on_end(complete: bool) -> None:
            del self._by_engine_id[engine_id], self._engine_ids[request_id]
            if not complete:
                self._abort(engine_id)

        stream = RequestStream(request, on_end, self._unread)
        self._by_engine_id[engine_id], self._engine_ids[request_id] = stream, engine_id
        return engine_id, stream

    def engine_id(self, request_id: str) -> str | None:
        """The engine id of a request in flight."""
        return self._engine_ids.get(request_id)

    def engine_ids(self) -> list[str]:
        """The engine ids of all requests in flight."""
        return list(self._by_engine_id)

    def deliver(self, event: RequestEvent) -> None:
        """Pass an event to its stream; events of requests that have ended are dropped."""
        stream = self._by_engine_id.get(event.request_id)
        if stream is not None:
            stream.push(event)

    def fail(self, engine_ids: Sequence[str], error: RequestError) -> None:
        """End these requests with ``error``. The end of one may end others, whose readers are too slow."""
        if engine_ids:
            _LOG.warning("%d requests in flight end: %s", len(engine_ids), error)
        for engine_id in engine_ids:
            if (stream := self._by_engine_id.get(engine_id)) is not None:
                stream.fail(error)


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


@dataclass(slots=True)
class _Submission:
    """A request in the queue."""

    request: Request
    alone: bool
    came_s: float  # monotonic seconds
    samples_left: int  # that the engine has not ended
    cut_short: bool = False  # a sample was


class SubmitQueue:
    """Sends requests to the engine in order; a suspect is sent when nothing else runs, and nothing else beside it.

    What was sent runs until the engine has ended it, even if its reader has gone: a request that hangs the engine is
    still the one to blame then.

    send: takes the engine id, the request and the seconds that it has waited here. completed: takes each request whose
    samples all came to their own end.
    """

    def __init__(self, send: Callable[[str, Request, float], None], completed: Callable[[Request], None]) -> None:
        self._send, self._completed = send, completed
        self._waiting: OrderedDict[str, _Submission] = OrderedDict()  # both by engine id
        self._running: dict[str, _Submission] = {}
        self._alone = False

    def __len__(self) -> int:
        """Requests that were not sent."""
        return len(self._waiting)

    def put(self, engine_id: str, request: Request, *, alone: bool) -> bool:
        """Send a request, now or later; returns whether it was sent."""
        self._waiting[engine_id] = _Submission(request, alone, time.monotonic(), request.sampling.n)
        self._send_next()
        return engine_id in self._running

    def drop(self, engine_id: str) -> tuple[Request, float] | None:
        """Forget a request that was not sent; returns it and the seconds that it waited. None: there is none."""
        entry = self._waiting.pop(engine_id, None)
        if entry is None:
            return None
        self._send_next()
        return entry.request, time.monotonic() - entry.came_s

    def finished(self, engine_id: str, reason: FinishReason) -> None:
        """The engine has ended a sample."""
        entry = self._running.get(engine_id)
        if entry is None:
            return
        entry.samples_left -= 1
        entry.cut_short = entry.cut_short or reason in _CUT_SHORT
        if entry.samples_left == 0:
            if not entry.cut_short:
                self._completed(entry.request)
            self.ended(engine_id)

    def ended(self, engine_id: str) -> None:
        """The engine has ended a request."""
        self._running.pop(engine_id, None)
        self._alone = self._alone and bool(self._running)
        self._send_next()

    def clear(self) -> dict[str, Request]:
        """Forget every request, since the engine is lost; returns those that it had, by engine id."""
        had = {engine_id: entry.request for engine_id, entry in self._running.items()}
        self._waiting.clear()
        self._running.clear()
        self._alone = False
        return had

    def _send_next(self) -> None:
        while self._waiting and not self._alone:
            engine_id, entry = next(iter(self._waiting.items()))
            if entry.alone and self._running:
                return
            del self._waiting[engine_id]
            self._running[engine_id] = entry
            self._alone = entry.alone
            self._send(engine_id, entry.request, time.monotonic() - entry.came_s)


DEFAULT_TRACE_STEPS = 50
MAX_TRACE_STEPS = 1024
TRACE_LIMIT_RULE = f"must lie in 1..{MAX_TRACE_STEPS}"


_NOT_SENT = "the engine stopped before it got this request; retry shortly"


class EngineClient:
    """Submits requests and commands to the process that ``engine`` runs. Belongs to one event loop."""

    def __init__(self, engine: EngineSupervisor, observer: Observer | None = None) -> None:
        """observer: records every request."""
        self.engine = engine
        self._observer = observer
        self._suspects = Suspects()
        self._queue = SubmitQueue(self._submit, self._suspects.completed)
        self._table = RequestTable(self._left)
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
        alone = self._suspects.must_run_alone(request)
        if len(self._queue) >= MAX_QUEUED_REQUESTS:
            raise QueueFullError(MAX_QUEUED_REQUESTS, UNAVAILABLE_RETRY_S)
        engine_id, stream = self._table.open(request)
        if self._observer is not None:
            stream.record = self._observer.request(request)
        if not self._queue.put(engine_id, request, alone=alone):
            self._limit_wait(engine_id, request)
        return stream

    def _submit(self, engine_id: str, request: Request, waited_s: float) -> None:
        self.engine.send(Frame.SUBMIT, (engine_id, *pack(request)[1:]), waited_s)

    def _limit_wait(self, engine_id: str, request: Request) -> None:
        """Let the request's deadline and time limit end it while it waits; the engine does once it is sent."""
        limits = (request.deadline_s, FinishReason.DEADLINE), (request.stopping.time_limit_s, FinishReason.TIME_LIMIT)
        for limit_s, reason in limits:
            if limit_s is not None:
                asyncio.get_running_loop().call_later(limit_s, self._end_unsent, engine_id, reason)

    def _end_unsent(self, engine_id: str, reason: FinishReason) -> bool:
        """End a request as the engine would, unless it was sent; returns whether it was not."""
        dropped = self._queue.drop(engine_id)
        if dropped is None:
            return False
        request, waited_s = dropped
        for event in unstarted(engine_id, request, reason, waited_s * 1e3):
            self._table.deliver(event)
        return True

    def _left(self, engine_id: str) -> None:
        """The reader of a request has gone."""
        if self._queue.drop(engine_id) is None:
            self.engine.send(Frame.ABORT, engine_id)

    def abort(self, request_id: str) -> bool:
        """End a request: its reader gets Finished(ABORTED) per open sample. False when it is not in flight."""
        engine_id = self._table.engine_id(request_id)
        if engine_id is None:
            return False
        if not self._end_unsent(engine_id, FinishReason.ABORTED):
            self.engine.send(Frame.ABORT, engine_id)
        return True

    def fail_all(self, error: EngineDeadError) -> None:
        """End every request in flight with ``error``, in the engine too."""
        engine_ids = self._table.engine_ids()
        for engine_id in engine_ids:
            self._left(engine_id)
        self._table.fail(engine_ids, error)

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
        return await asyncio.shield(self._swap_draft(draft, dtype))

    async def _swap_draft(self, draft: str | None, dtype: WeightDtype | None) -> EngineInfo:
        info = unpack(EngineInfo, await self._call(SWAP_DRAFT, draft, dtype))
        config = self.engine.config
        is_head = draft is not None and draft == info.head
        head = config.model_copy(update={"draft_head": draft})
        self.engine.adopt(info, head if is_head else _with_draft(config, draft, dtype))
        return info

    def on_frame(self, frame: list[Any]) -> None:
        """Take what the engine answers.

        Raises:
            ValueError, TypeError: the frame is malformed.
        """
        kind, *rest = frame
        match kind:
            case Frame.EVENTS:
                for parts in rest[0]:
                    self._on_event(unpack_event(parts))
            case Frame.ADMIN:
                self._on_answer(*rest)
            case _:
                raise ValueError(f"unknown frame {kind!r}")

    def _on_event(self, event: RequestEvent) -> None:
        if isinstance(event, Finished):
            self._queue.finished(event.request_id, event.reason)
        elif isinstance(event, Failed):
            self._queue.ended(event.request_id)
        self._table.deliver(event)  # last: it sets the event's id to the caller's

    def _on_answer(self, number: int, error: Sequence[Any] | None, result: Any) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():
            return  # its caller has gone
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(unpack_error(error))

    def on_lost(self, error: EngineDeadError, *, died: bool = False) -> None:
        """End every request and call with ``error``. After a death, the requests that were running become suspects,
        and those that were not sent end with an error that does not count the death against them."""
        sent = self._queue.clear()
        if died:
            self._suspects.died(sent.values())
            unsent = [engine_id for engine_id in self._table.engine_ids() if engine_id not in sent]
            self._table.fail(unsent, EngineDeadError(_NOT_SENT, error.retry_after_s))
        self._table.fail(self._table.engine_ids(), error)
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
