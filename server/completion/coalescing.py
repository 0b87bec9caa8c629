"""Generations in flight: equal requests share one, equal prompts are computed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import replace
from typing import Protocol

from server.auth.principal import Principal
from server.errors import GenerationFailedError, SlowReaderError
from server.request_stream import UnreadEvents, weight_of
from specdec.core.types import Delta, Finished, Request, RequestEvent, SpeculationParams
from specdec.errors import RequestError


class EventSource(Protocol):
    """A request that was submitted; `server.admission.Ticket` and `RequestStream` are such."""

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


class CoalescedRequest:
    """Keeps a request's events for readers that come later. Once the last reader has left, the request is ended.

    What is kept of a running one is bounded by how many the engine runs. Of one that has ended it counts in ``unread``
    until the last reader has left: who does not read would else keep as many as it likes.

    ``text``: of sample 0, as far as it is certain. ``finished``: the end of sample 0. ``error``: what ended the request
    instead. ``on_change`` is told of the first tokens and of the end. Made with one reader, who must `leave`.
    """

    def __init__(
        self, source: EventSource, on_change: Callable[[CoalescedRequest], None], unread: UnreadEvents | None = None
    ) -> None:
        self.events: list[RequestEvent] = []
        self.text = ""
        self.finished: Finished | None = None
        self.error: RequestError | None = None
        self.ended = self.has_tokens = False
        self._source, self._on_change = source, on_change
        self._unread = unread or UnreadEvents()
        self._readers = 1
        self._wake = asyncio.Event()
        self._pump = asyncio.create_task(self._read(), name="completion-run")

    def join(self) -> None:
        """One reader more."""
        self._readers += 1

    def leave(self) -> None:
        """One reader less."""
        self._readers -= 1
        if self._readers:
            return
        self._unread.forget(self)
        if not self.ended:
            self._source.close()
            self._pump.cancel()
            self._end()

    def overrun(self) -> None:
        """Too much waits, and most of it here: its readers get no more of it."""
        self.events, self.error = [], SlowReaderError()
        self._unread.forget(self)

    async def more(self, seen: int) -> None:
        """Wait until there are more than ``seen`` events, or the end."""
        while len(self.events) <= seen and not self.ended:
            await self._wake.wait()

    async def read(self) -> AsyncIterator[RequestEvent]:
        """All events, from the first one on.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        seen = 0
        while True:
            while seen < len(self.events):
                yield self.events[seen]
                seen += 1
            if self.ended:
                break
            await self.more(seen)
        if self.error is not None:
            raise self.error

    async def _read(self) -> None:
        try:
            while True:
                self._take(await anext(self._source))
        except StopAsyncIteration:
            pass
        except RequestError as error:
            self.error = error
        except Exception as error:
            self.error = GenerationFailedError("INTERNAL", "the completion's reader broke")
            raise error
        finally:
            self._source.close()
            self._end()

    def _take(self, event: RequestEvent) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            if event.index == 0:
                self.text += event.text
            if not self.has_tokens:
                self.has_tokens = True
                self._on_change(self)
        elif isinstance(event, Finished) and event.index == 0:
            self.finished = event
        self._notify()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            if self._readers:
                self._unread.add(self, sum(map(weight_of, self.events)))
            self._on_change(self)
            self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()


SHORTEST_SHARED = 64  # tokens of a prompt below which the prefix cache, which knows whole pages, has nothing to share


class RequestCoalescer:
    """The engine holds back the further samples of a request until its prompt is cached. Here the same is done for
    requests that come one by one, as editors send them: one whose prompt is being computed waits until that is done,
    and one that would get the very same answer gets that one.

    Callers share with their own tenant and cache salt only.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._equal: dict[Hashable, tuple[CoalescedRequest, float | None]] = {}
        self._prompts: dict[Hashable, CoalescedRequest] = {}
        self._runs: set[CoalescedRequest] = set()
        self._unread = UnreadEvents()

    @property
    def in_flight(self) -> int:
        """Runs that have not ended."""
        return len(self._runs)

    async def start(
        self, principal: Principal, request: Request, supersedes_key: str = ""
    ) -> tuple[CoalescedRequest, bool]:
        """A run of ``request`` that the caller reads, and has to leave; and whether it is somebody else's too.

        Raises:
            RequestError: the request is not taken.
        """
        owner = (principal.tenant, request.cache_salt)
        equal = None if supersedes_key else _equal_key(request)
        prompt = (owner, request.prompt_ids) if len(request.prompt_ids) > SHORTEST_SHARED else None
        loop = asyncio.get_running_loop()
        until = None if request.deadline_s is None else loop.time() + request.deadline_s
        while True:
            if equal is not None and (found := self._equal.get((owner, equal))) is not None:
                run, its_end = found
                if its_end is None or (until is not None and until <= its_end):
                    run.join()
                    return run, True
            first = None if prompt is None else self._prompts.get(prompt)
            if first is None:
                break
            seen = len(first.events)
            await first.more(seen)
        if until is not None:
            request = replace(request, deadline_s=max(1e-3, until - loop.time()))
        run = CoalescedRequest(self._submit(principal, request, supersedes_key), self._changed, self._unread)
        self._runs.add(run)
        if equal is not None:
            self._equal[owner, equal] = (run, until)
        if prompt is not None:
            self._prompts[prompt] = run
        return run, False

    def _changed(self, run: CoalescedRequest) -> None:
        for prompt in [prompt for prompt, first in self._prompts.items() if first is run]:
            del self._prompts[prompt]
        if run.ended:
            self._runs.discard(run)
            for equal in [equal for equal, (other, _) in self._equal.items() if other is run]:
                del self._equal[equal]


def _equal_key(request: Request) -> Request | None:
    """All of ``request`` that decides about its answer; None where chance or the clock decides too."""
    stopping = request.stopping
    chance = request.sampling.temperature != 0 and request.sampling.seed is None
    if chance or stopping.time_limit_s is not None or stopping.decode_limit_s is not None:
        return None
    return replace(
        request, request_id="", speculation=SpeculationParams(), priority=0, deadline_s=None, prediction_ids=(),
        session="", target_tpot_ms=None,
    )  # fmt: skip
