"""Gives a call's requests to the engine, in the name of its caller, and reads their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from server.admission.ticket import Ticket
from server.auth.caller import current_caller
from server.http.face import Face
from server.request_errors import DeadlinePassedError
from specdec.errors import RequestError
from specdec.types import Delta, Finished, FinishReason, Request, RequestEvent


async def generate(
    face: Face, requests: Sequence[Request], *, share: bool = False, supersedes_key: str = ""
) -> AsyncGenerator[tuple[int, RequestEvent]]:
    """The events of ``requests``, one per prompt, as they come: (which request, event).

    Samples are numbered through: sample i of request r is r * n + i. To be read inside `contextlib.aclosing`: closing
    it, by an error or a cancellation too, ends all requests in the engine at once. ``share``: a single request may be
    answered with the events of an equal one that runs already (`server.completion.run_table.RunTable`).
    ``supersedes_key``: ends the running request of the same tenant with the same one, for the first of ``requests``.

    Raises:
        RequestError: the caller may not, or the engine refuses or fails one of them.
    """
    if share and len(requests) == 1:
        async with aclosing(_shared(face, requests[0], supersedes_key)) as events:
            async for event in events:
                yield 0, _checked(event)
        return
    tickets: list[Ticket] = []
    try:
        for i, request in enumerate(requests):
            key = "" if i else supersedes_key
            tickets.append(face.frontend.admission.admit(current_caller(), request, key))
        if len(tickets) == 1:
            async for event in tickets[0]:
                yield 0, _checked(event)
            return
        n = requests[0].sampling.n
        async with aclosing(_merged(tickets)) as events:
            async for which, event in events:
                found = _checked(event)
                if isinstance(found, Delta | Finished):
                    found.index += which * n
                yield which, found
    finally:
        for ticket in tickets:
            ticket.close()


def _checked(event: RequestEvent) -> RequestEvent:
    if isinstance(event, Finished) and event.reason == FinishReason.DEADLINE:
        raise DeadlinePassedError
    return event


async def _shared(face: Face, request: Request, supersedes_key: str) -> AsyncGenerator[RequestEvent]:
    run, _ = await face.completion.runs.start(current_caller(), request, supersedes_key)
    try:
        async for event in run.read():
            yield event
    finally:
        run.leave()


async def _merged(tickets: Sequence[Ticket]) -> AsyncGenerator[tuple[int, RequestEvent]]:
    queue: asyncio.Queue[tuple[int, RequestEvent | RequestError | None]] = asyncio.Queue()

    async def pump(which: int, ticket: Ticket) -> None:
        try:
            async for event in ticket:
                queue.put_nowait((which, event))
            queue.put_nowait((which, None))
        except RequestError as error:
            queue.put_nowait((which, error))

    pumps = [asyncio.create_task(pump(which, ticket)) for which, ticket in enumerate(tickets)]
    try:
        left = len(pumps)
        while left:
            which, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, RequestError):
                raise item
            else:
                yield which, item
    finally:
        for task in pumps:
            task.cancel()
