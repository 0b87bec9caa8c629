"""Which requests are in flight, and under which ticket the engine knows them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

from server.request_stream import RequestStream
from specdec.errors import DuplicateRequestError, RequestError
from specdec.types import Request, RequestEvent

_LOG = logging.getLogger(__name__)


class RequestTable:
    """Streams by ticket and by request id.

    The engine is given a ticket in place of the caller's id, fresh for each submission: a caller may use an id again
    right after cancelling, while the engine still has events of the former request on their way.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._by_ticket: dict[str, RequestStream] = {}
        self._tickets: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_ticket)

    def open(self, request: Request) -> tuple[str, RequestStream]:
        """A ticket and a stream for ``request``.

        Raises:
            DuplicateRequestError: its id is in flight.
        """
        request_id = request.request_id
        if request_id in self._tickets:
            raise DuplicateRequestError(f"request_id {request_id!r} is in flight; choose another")
        ticket = f"{next(self._numbers)}:{request_id}"

        def on_end(complete: bool) -> None:
            del self._by_ticket[ticket], self._tickets[request_id]
            if not complete:
                self._abort(ticket)

        stream = RequestStream(request_id, request.sampling.n, on_end)
        self._by_ticket[ticket], self._tickets[request_id] = stream, ticket
        return ticket, stream

    def ticket(self, request_id: str) -> str | None:
        """The ticket of a request in flight."""
        return self._tickets.get(request_id)

    def tickets(self) -> list[str]:
        """Those of all requests in flight."""
        return list(self._by_ticket)

    def deliver(self, event: RequestEvent) -> None:
        """Hand an event of the engine to its reader; those of requests nobody waits for are dropped."""
        stream = self._by_ticket.get(event.request_id)
        if stream is not None:
            stream.push(event)

    def refuse(self, ticket: str, error: RequestError) -> None:
        """The engine did not take a request."""
        stream = self._by_ticket.get(ticket)
        if stream is not None:
            stream.fail(error)

    def fail_all(self, error: RequestError) -> None:
        """End every request in flight with ``error``."""
        if self._by_ticket:
            _LOG.warning("%d requests in flight end: %s", len(self._by_ticket), error)
        for stream in list(self._by_ticket.values()):
            stream.fail(error)
