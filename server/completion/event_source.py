"""What a request's events are read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.auth.principal import Principal
from specdec.types import Request, RequestEvent


class EventSource(Protocol):
    """A request that was submitted; `server.admission.ticket.Ticket` and `RequestStream` are such."""

    async def __anext__(self) -> RequestEvent:
        """The next event.

        Raises:
            StopAsyncIteration: the request is complete.
            RequestError: it was refused, or it failed.
        """

    def close(self) -> None:
        """Nobody reads on: end the request at once unless it is complete."""


# Gives a request to the engine in somebody's name, with the key by which it supersedes another, if it has one
Submit = Callable[[Principal, Request, str], EventSource]
