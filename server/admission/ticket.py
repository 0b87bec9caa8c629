"""One request that was let in, and its events."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from server.admission.admission_errors import SupersededError
from server.request_stream import RequestStream
from server.telemetry.request_record import RequestRecord
from specdec.errors import RequestError
from specdec.types import Finished, FinishReason, Request, RequestEvent


class TicketListener(Protocol):
    """Who keeps the books of tickets."""

    def heard(self, ticket: Ticket, event: RequestEvent) -> None:
        """The reader got an event."""

    def ended(self, ticket: Ticket) -> None:
        """It takes no room any more. Told once."""


class Ticket:
    """Async iterator over a request's events, as `RequestStream` is: ends after the last sample's Finished, or raises a
    `RequestError`. Use as ``async with``, or `close` it: leaving it before the end aborts the request at once.

    ``request`` is what the engine was given; events carry ``request_id``, which the caller gave.
    """

    def __init__(
        self, request: Request, request_id: str, stream: RequestStream, listener: TicketListener, key: str
    ) -> None:
        self.request, self.request_id, self.key = request, request_id, key
        self.started = False
        self.samples_left = request.sampling.n
        stream.request_id = request_id
        self._stream = stream
        self._listener: TicketListener | None = listener
        self._superseded = self._cut = False

    @property
    def record(self) -> RequestRecord | None:
        """What is known of it, where that is kept."""
        return self._stream.record

    def supersede(self, abort: Callable[[str], bool]) -> None:
        """A newer request takes its place: it ends with what it has, then with `SupersededError`."""
        self._superseded = abort(self.request.request_id)
        self._end()

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> RequestEvent:
        try:
            event = await anext(self._stream)
        except StopAsyncIteration:
            self._end()
            if self._superseded and self._cut:
                self._superseded = False
                raise SupersededError from None
            raise
        except RequestError:
            self._end()
            raise
        if isinstance(event, Finished):
            self.samples_left -= 1
            self._cut = self._cut or event.reason == FinishReason.ABORTED
        if self._listener is not None:
            self._listener.heard(self, event)
        return event

    def close(self) -> None:
        """Nobody reads on: abort the request unless it is complete."""
        self._stream.close()
        self._end()

    async def aclose(self) -> None:
        """As `close`; what `contextlib.aclosing` looks for."""
        self.close()

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.ended(self)
