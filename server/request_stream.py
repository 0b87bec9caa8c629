"""The stream of one request's events, and the memory that unread events may take."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from server.errors import DeadlinePassedError, SlowReaderError, SupersededError, unpack_error
from server.observe.records import RequestRecord
from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    Started,
)
from specdec.errors import QueueFullError, RequestError

MAX_UNREAD_BYTES = 1 << 26


def weight_of(event: RequestEvent | RequestError) -> int:
    """Approximate bytes that ``event`` takes while it waits."""
    if not isinstance(event, Delta):
        return 1024
    tops = sum(160 + 120 * len(row.top) for row in event.logprobs)
    nodes = 0 if event.tree is None else 240 * len(event.tree.tokens)
    return 512 + 4 * len(event.text) + 40 * len(event.token_ids) + tops + nodes


class UnreadEvents:
    """Bytes of unread events over all streams.

    Beyond ``limit`` bytes the stream with the most unread bytes is ended. One reader may therefore pause for long,
    while many readers that never read cannot fill the memory.
    """

    def __init__(self, limit: int = MAX_UNREAD_BYTES) -> None:
        self._limit = limit
        self._of: dict[RequestStream, int] = {}
        self.total = 0

    def add(self, stream: RequestStream, weight: int) -> None:
        """Count ``weight`` bytes that ``stream`` buffers."""
        self.total += weight
        self._of[stream] = self._of.get(stream, 0) + weight
        if self.total > self._limit:
            max(self._of, key=self._of.__getitem__).overrun()

    def taken(self, stream: RequestStream, weight: int) -> None:
        """Subtract ``weight`` bytes that were read."""
        self.total -= weight
        left = self._of[stream] - weight
        if left:
            self._of[stream] = left
        else:
            del self._of[stream]

    def forget(self, stream: RequestStream) -> None:
        """Subtract everything that ``stream`` buffers."""
        self.total -= self._of.pop(stream, 0)


class StreamListener(Protocol):
    """Accounts for requests in flight."""

    def on_event(self, stream: RequestStream, event: RequestEvent) -> None:
        """``event`` came."""

    def ended(self, stream: RequestStream) -> None:
        """The request holds no place any more. Called once."""

    def wait_s(self, but: RequestStream) -> float:
        """Seconds until a request submitted now would start if ``but`` were not in flight."""


class RequestStream:
    """Async iterator over one request's events; ends after the last sample's Finished.

    Use it as ``async with``: leaving the block before the end aborts the request. A reader never holds up the engine:
    unread events wait here, as far as ``unread`` has room. One task at a time may read.

    Iteration raises a `RequestError` where the engine refuses or fails the request, `DeadlinePassedError` where its
    deadline passes, and `SupersededError` after the events of a request whose place a newer one took.
    """

    def __init__(
        self, request: Request, on_end: Callable[[bool], None], record: RequestRecord, unread: UnreadEvents
    ) -> None:
        """on_end: called once at the end; its argument says whether the engine has ended the request itself."""
        self.request = request  # as the engine was given it
        self.request_id = request.request_id  # the caller's, which events carry
        self.supersedes_key = ""  # scoped to the tenant; empty: none
        self.admitted_s = 0.0  # monotonic seconds of the listener
        self.started = False  # Started came
        self.unread = unread  # counts the events that wait here
        self.record = record  # gets every event and the end, read or not
        self.watcher: Callable[[RequestEvent], None] | None = None  # gets each event as it comes, read or not
        self._samples_left = request.sampling.n
        self._on_end: Callable[[bool], None] | None = on_end
        self._items: deque[tuple[RequestEvent | RequestError, int]] = deque()  # each with its weight in bytes
        self._waiting: asyncio.Future[None] | None = None
        self._superseded = self._cut = False
        self._listener: StreamListener | None = None

    def listen(self, listener: StreamListener, request_id: str, supersedes_key: str, admitted_s: float) -> None:
        """Report to ``listener`` from now on, and give events the caller's ``request_id``."""
        self._listener, self.request_id = listener, request_id
        self.supersedes_key, self.admitted_s = supersedes_key, admitted_s

    @property
    def samples_left(self) -> int:
        """Samples that the engine has not ended, however much of them was read."""
        return self._samples_left if self._on_end is not None else 0

    def push(self, event: RequestEvent) -> None:
        """Take the engine's next event of this request; those after its end are dropped."""
        if self._on_end is None:
            return
        if isinstance(event, Failed):
            self.fail(unpack_error((event.reason, event.message, event.details)))
            return
        self.record.saw(event)
        if self.watcher is not None:
            self.watcher(event)
        self.started = self.started or isinstance(event, Started)
        if self._listener is not None:
            self._listener.on_event(self, event)
        event.request_id = self.request_id
        if not isinstance(event, Finished):
            self._put(event)
            return
        self._samples_left -= 1
        self._cut = self._cut or event.reason is FinishReason.ABORTED
        self._put(self._late() if event.reason is FinishReason.DEADLINE else event)
        if self._samples_left == 0:
            if self._superseded and self._cut:
                self._put(SupersededError())
            self._end(complete=True)

    def fail(self, error: RequestError) -> None:
        """End the request; the reader gets ``error`` after the events that came before it."""
        if self._on_end is None:
            return
        self.record.error = error
        if isinstance(error, QueueFullError) and self._listener is not None:
            wait_s = max(error.retry_after_s or 0.0, self._listener.wait_s(self))
            error = QueueFullError(error.limit, wait_s, error.items)
        self._put(error)
        self._end(complete=True)

    def supersede(self, abort: Callable[[str], bool]) -> None:
        """Abort the request for a newer one: the reader gets what there is, then `SupersededError`."""
        self._superseded = True
        self._release()
        abort(self.request.request_id)

    def close(self) -> None:
        """Drop unread events, and abort the request unless it is complete."""
        self._items.clear()
        self.unread.forget(self)
        self._end(complete=False)

    def overrun(self) -> None:
        """Drop unread events for lack of memory, and abort the request unless it is complete."""
        error = SlowReaderError()
        if self._on_end is not None:
            self.record.error = error
        self.close()
        self._append(error, 0)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._items:
            if self._on_end is None:
                raise StopAsyncIteration
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        item, weight = self._items.popleft()
        if weight:
            self.unread.taken(self, weight)
        if isinstance(item, RequestError):
            self.close()
            raise item
        return item

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _late(self) -> DeadlinePassedError:
        """The end of a sample whose deadline passed. If the request was not started, that of its first sample, which is
        all that the reader gets, has the time after which to retry."""
        if self._listener is None or self.started or self._samples_left + 1 < self.request.sampling.n:
            return DeadlinePassedError()
        return DeadlinePassedError(self._listener.wait_s(self))

    def _put(self, item: RequestEvent | RequestError) -> None:
        weight = weight_of(item)
        self._append(item, weight)
        self.unread.add(self, weight)

    def _append(self, item: RequestEvent | RequestError, weight: int) -> None:
        self._items.append((item, weight))
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end(self, *, complete: bool) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(complete)
            self.record.ended(complete)
            self._release()

    def _release(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.ended(self)
