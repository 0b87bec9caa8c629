"""What waits for the engine's process: the streams of requests, operators' commands, reads of its trace."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from server.errors import GenerationFailedError, SlowReaderError, unpack_error
from server.observe.records import RequestRecord
from specdec.core.types import Delta, Failed, Finished, Request, RequestEvent
from specdec.errors import DuplicateRequestError, RequestError

_LOG = logging.getLogger(__name__)

MOST_UNREAD_BYTES = 1 << 26


def weight_of(event: RequestEvent | RequestError) -> int:
    """About how many bytes it takes while it waits."""
    if not isinstance(event, Delta):
        return 1024
    tops = sum(160 + 120 * len(row.top) for row in event.logprobs)
    nodes = 0 if event.tree is None else 240 * len(event.tree.tokens)
    return 512 + 4 * len(event.text) + 40 * len(event.token_ids) + tops + nodes


class Overrunnable(Protocol):
    """What events wait in."""

    def overrun(self) -> None:
        """Give up what waits: it is too much."""


class UnreadEvents:
    """What waits for readers, over all streams, in bytes; beyond ``limit`` the stream with the most of it is ended: a
    reader may pause as long as it likes where few do, and many that never read can not fill the memory."""

    def __init__(self, limit: int = MOST_UNREAD_BYTES) -> None:
        self._limit = limit
        self._of: dict[Overrunnable, int] = {}
        self.total = 0

    def add(self, stream: Overrunnable, weight: int) -> None:
        """Something came."""
        self.total += weight
        self._of[stream] = self._of.get(stream, 0) + weight
        if self.total > self._limit:
            max(self._of, key=self._of.__getitem__).overrun()

    def taken(self, stream: Overrunnable, weight: int) -> None:
        """Something was read."""
        self.total -= weight
        left = self._of[stream] - weight
        if left:
            self._of[stream] = left
        else:
            del self._of[stream]

    def forget(self, stream: Overrunnable) -> None:
        """Nothing of it waits any more."""
        self.total -= self._of.pop(stream, 0)


class RequestStream:
    """Async iterator over a request's events; ends after the last sample's Finished, or raises a `RequestError`.

    Use as ``async with``: leaving it before the end, by a break, an error or a cancellation, aborts the request at
    once. Nothing that the reader does holds up the engine: unread events wait here, as far as ``unread`` has room. One
    task at a time may read.
    """

    def __init__(
        self, request_id: str, samples: int, on_end: Callable[[bool], None], unread: UnreadEvents | None = None
    ) -> None:
        self.request_id = request_id
        self._unread = unread or UnreadEvents()
        self._samples_left = samples
        self._on_end: Callable[[bool], None] | None = on_end
        self._items: deque[tuple[RequestEvent | RequestError, int]] = deque()  # each with its weight
        self._waiting: asyncio.Future[None] | None = None
        self._over = False
        self._record: RequestRecord | None = None

    def record_in(self, record: RequestRecord) -> None:
        """Tell ``record`` of every event and of the end, whether or not anybody reads."""
        self._record = record

    @property
    def record(self) -> RequestRecord | None:
        """Where it is recorded, if it is."""
        return self._record

    @property
    def samples_left(self) -> int:
        """Samples that the engine has not ended, whatever of the others was read."""
        return self._samples_left if self._on_end is not None else 0

    def push(self, event: RequestEvent) -> None:
        """Take the engine's next event of this request."""
        if isinstance(event, Failed):
            self.fail(GenerationFailedError(event.reason, event.message))
            return
        if self._record is not None:
            self._record.saw(event)
        event.request_id = self.request_id
        self._put(event)
        if isinstance(event, Finished):
            self._samples_left -= 1
            if self._samples_left == 0:
                self._end(complete=True)

    def fail(self, error: RequestError) -> None:
        """End the request with ``error``, after what came before it was read."""
        if self._on_end is not None:
            if self._record is not None:
                self._record.failed(error)
            self._put(error)
            self._end(complete=True)

    def close(self) -> None:
        """Nobody reads on: abort the request unless it is complete."""
        self._over = True
        self._items.clear()
        self._unread.forget(self)
        self._end(complete=False)

    def overrun(self) -> None:
        """Too much of it waits: that is given up, and the request with it unless it is complete."""
        error = SlowReaderError()
        self._items.clear()
        self._unread.forget(self)
        self._append(error, 0)
        if self._on_end is not None and self._record is not None:
            self._record.failed(error)
        self._end(complete=False)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestEvent:
        if self._over:
            raise StopAsyncIteration
        while not self._items:
            if self._on_end is None:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item, weight = self._items.popleft()
        if weight:
            self._unread.taken(self, weight)
        if isinstance(item, RequestError):
            self._over = True
            raise item
        return item

    async def aclose(self) -> None:
        """As `close`; what `contextlib.aclosing` looks for."""
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, item: RequestEvent | RequestError) -> None:
        weight = weight_of(item)
        self._append(item, weight)
        self._unread.add(self, weight)

    def _append(self, item: RequestEvent | RequestError, weight: int) -> None:
        self._items.append((item, weight))
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end(self, *, complete: bool) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(complete)
            if self._record is not None:
                self._record.ended(complete)


class RequestTable:
    """Streams by engine id and by request id.

    The engine is given an id of its own in place of the caller's, fresh for each submission: a caller may use an id
    again right after cancelling, while the engine still has events of the former request on their way.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
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

        stream = RequestStream(request_id, request.sampling.n, on_end, self._unread)
        self._by_engine_id[engine_id], self._engine_ids[request_id] = stream, engine_id
        return engine_id, stream

    def engine_id(self, request_id: str) -> str | None:
        """The engine id of a request in flight."""
        return self._engine_ids.get(request_id)

    def engine_ids(self) -> list[str]:
        """Those of all requests in flight."""
        return list(self._by_engine_id)

    def deliver(self, event: RequestEvent) -> None:
        """Hand an event of the engine to its reader; those of requests nobody waits for are dropped."""
        stream = self._by_engine_id.get(event.request_id)
        if stream is not None:
            stream.push(event)

    def refuse(self, engine_id: str, error: RequestError) -> None:
        """The engine did not take a request."""
        stream = self._by_engine_id.get(engine_id)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: RequestError) -> None:
        """End every request in flight with ``error``."""
        if self._by_engine_id:
            _LOG.warning("%d requests in flight end: %s", len(self._by_engine_id), error)
        for stream in list(self._by_engine_id.values()):
            stream.fail(error)


DEFAULT_TRACE_STEPS = 50
MAX_TRACE_STEPS = 1024
TRACE_LIMIT_RULE = f"must lie in 1..{MAX_TRACE_STEPS}"


class EngineCalls:
    """Calls of the engine by number: futures of their answers."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[Any], Any]]] = {}
        self._numbers = itertools.count(1)

    def open(self, read: Callable[[Any], Any]) -> tuple[int, asyncio.Future[Any]]:
        """A number and the future of its answer, which raises a `RequestError` where there will be none.

        ``read`` makes the future's result of the answer; it is called even if nobody waits any more.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, read)
        return number, future

    def answer(self, number: int, error: Sequence[Any] | None, result: Any) -> None:
        """Hand the engine's answer to who waits for it, if anybody still does."""
        found = self._waiting.pop(number, None)
        if found is None:
            return
        future, read = found
        if error is None:
            result = read(result)
            if not future.done():
                future.set_result(result)
        elif not future.done():
            future.set_exception(unpack_error(error))

    def fail_all(self, error: RequestError) -> None:
        """End every call with ``error``."""
        while self._waiting:
            _, (future, _) = self._waiting.popitem()
            if not future.done():
                future.set_exception(error)
