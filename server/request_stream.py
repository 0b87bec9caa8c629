"""The events of one request, as the one who asked reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from server.request_errors import GenerationFailedError
from server.telemetry.request_record import RequestRecord
from specdec.errors import RequestError
from specdec.types import Failed, Finished, RequestEvent


class RequestStream:
    """Async iterator over a request's events; ends after the last sample's Finished, or raises a `RequestError`.

    Use as ``async with``: leaving it before the end, by a break, an error or a cancellation, aborts the request at
    once. Nothing that the reader does holds up the engine: unread events wait here. One task at a time may read.
    """

    def __init__(self, request_id: str, samples: int, on_end: Callable[[bool], None]) -> None:
        self.request_id = request_id
        self._samples_left = samples
        self._on_end: Callable[[bool], None] | None = on_end
        self._items: deque[RequestEvent | RequestError] = deque()
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
        item = self._items.popleft()
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
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end(self, *, complete: bool) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(complete)
            if self._record is not None:
                self._record.ended(complete)
