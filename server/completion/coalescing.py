"""Request coalescing: equal requests share one generation, equal prompts are computed once."""

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
    """The events of an admitted request: `server.request_stream.RequestStream`."""

    async def __anext__(self) -> RequestEvent:
        """The next event.

        Raises:
            StopAsyncIteration: the request is complete.
            RequestError: it was refused, or it failed.
        """

    def close(self) -> None:
        """Abort the request unless it is complete."""


class Submitter(Protocol):
    """Admits requests. Each method raises `RequestError` where a request is refused."""

    def submit(self, principal: Principal, request: Request, supersedes_key: str, *, hold: bool) -> EventSource:
        """Admit ``request`` and give it to the engine. hold: only after `release`."""

    def join(self, principal: Principal, request: Request) -> EventSource:
        """Admit a request that shares the answer of a running one. Close the source when the answer is read."""

    def release(self, source: EventSource) -> None:
        """Give a held request to the engine."""


class CoalescedRequest:
    """A request and its events, for any number of readers. When the last reader leaves, the request is aborted.

    The events of running requests are bounded by the number that the engine runs. Those of an ended request count in
    ``unread`` until the last reader leaves. A new one has one reader, who must `leave`.
    """

    text: str  # of sample 0
    finished: Finished | None  # of sample 0
    error: RequestError | None  # that ended the request

    def __init__(
        self,
        request: Request,
        source: EventSource,
        on_change: Callable[[CoalescedRequest], None],
        unread: UnreadEvents | None = None,
    ) -> None:
        """on_change: called at the first tokens and at the end."""
        self.request = request
        self.events: list[RequestEvent] = []
        self.text = ""
        self.finished, self.error = None, None
        self.ended = self.has_tokens = False
        self._source, self._on_change = source, on_change
        self._unread = unread or UnreadEvents()
        self._readers = 1
        self._joined: list[EventSource] = []  # admissions of further readers
        self._wake = asyncio.Event()
        self._pump = asyncio.create_task(self._read(), name="completion-run")

    def join(self, admitted: EventSource) -> None:
        """Add a reader."""
        self._readers += 1
        self._joined.append(admitted)

    def leave(self) -> None:
        """Remove a reader."""
        self._readers -= 1
        if self._joined:
            self._joined.pop().close()
        if self._readers:
            return
        self._unread.forget(self)
        if not self.ended:
            self._source.close()
            self._pump.cancel()
            self._end()

    def overrun(self) -> None:
        """Drop the events for lack of memory; readers get an error."""
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


SHORTEST_SHARED = 64  # tokens; shorter prompts fill no page of the prefix cache


class RequestCoalescer:
    """Shares work between requests of one tenant and cache salt.

    Every request is admitted first, by the limits of its own key. One that would get the same answer as a running
    request gets that answer. One whose prompt is being computed is held until that is done, so that it finds the prompt
    in the prefix cache. Neither happens to a request that
    the engine would schedule before the other.
    """

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        self._equal: dict[Hashable, tuple[CoalescedRequest, float | None]] = {}
        self._prompts: dict[Hashable, CoalescedRequest] = {}
        self._runs: set[CoalescedRequest] = set()
        self._unread = UnreadEvents()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Shared requests that have not ended."""
        return len(self._runs)

    async def start(
        self, principal: Principal, request: Request, supersedes_key: str = ""
    ) -> tuple[CoalescedRequest, bool]:
        """The shared request that answers ``request``, which the caller must leave, and whether it was running before.

        Raises:
            RequestError: the request is refused.
        """
        owner = (principal.tenant, request.cache_salt)
        equal = None if supersedes_key else _equal_key(request)
        prompt = (owner, request.prompt_ids) if len(request.prompt_ids) > SHORTEST_SHARED else None
        until = None if request.deadline_s is None else asyncio.get_running_loop().time() + request.deadline_s
        if equal is not None and (found := self._equal.get((owner, equal))) is not None:
            run, its_end = found
            in_time = its_end is None or (until is not None and until <= its_end)
            if in_time and (run.has_tokens or request.priority <= run.request.priority):
                run.join(self._submitter.join(principal, request))
                return run, True
        first = None if prompt is None else self._prompts.get(prompt)
        hold = first is not None and not _more_urgent(request, first.request)
        source = self._submitter.submit(principal, request, supersedes_key, hold=hold)
        run = CoalescedRequest(request, source, self._changed, self._unread)
        self._runs.add(run)
        if equal is not None:
            self._equal[owner, equal] = (run, until)
        if prompt is not None and hold:
            release = asyncio.create_task(self._release(run, source, prompt), name="coalesced-release")
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        elif prompt is not None:
            self._prompts[prompt] = run
        return run, False

    async def _release(self, run: CoalescedRequest, source: EventSource, prompt: Hashable) -> None:
        """Give a held request to the engine once no other computes its prompt."""
        while (first := self._prompts.get(prompt)) is not None and not run.ended:
            await first.more(len(first.events))
        if not run.ended:
            self._prompts[prompt] = run
            self._submitter.release(source)

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


def _more_urgent(request: Request, other: Request) -> bool:
    """Whether the engine would schedule ``request`` before ``other``, had both come now."""
    if request.priority != other.priority:
        return request.priority > other.priority
    return request.deadline_s is not None and (other.deadline_s is None or request.deadline_s < other.deadline_s)
