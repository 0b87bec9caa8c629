"""Coalescing of requests in flight: equal requests share one answer, equal prompts are computed once.

Every request is admitted first: limits of the queue and of keys, and its own deadline, hold for it whether it is
submitted at once, waits for a prompt, or joins an equal request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import suppress
from copy import copy
from dataclasses import replace

from server.admission import Admission
from server.auth.principal import Principal
from server.completion.time_budget import TimeBudget
from server.errors import GenerationFailedError
from server.observe.records import current_call
from server.request_stream import RequestStream, Ticket, weight_of
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent, SpeculationParams, Started
from specdec.errors import RequestError


class CoalescedRequest:
    """One reader's view of a request: its events, and the text and end of sample 0. Call `leave` after reading."""

    text: str  # of sample 0, as far as it was read
    has_tokens: bool  # of any sample
    finished: Finished | None  # of sample 0

    def __init__(self, source: Ticket) -> None:
        self.text, self.has_tokens, self.finished = "", False, None
        self._source = source

    def leave(self) -> None:
        """Stop reading. The engine's request ends with its last reader."""
        self._source.close()

    async def read(self) -> AsyncGenerator[RequestEvent]:
        """The events from the first one on; iterate once.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        async for event in self._source:
            if isinstance(event, Delta):
                self.has_tokens = True
                if event.index == 0:
                    self.text += event.text
            elif isinstance(event, Finished) and event.index == 0:
                self.finished = event
            yield event


MAX_HISTORY_BYTES = 1 << 20
"""Events of a running answer that are kept for further readers; a longer answer accepts no more readers."""


class SharedAnswer:
    """Passes the events of one request in the engine to all its readers. The last reader to leave ends the request.

    The engine has the first caller's request and its deadline, so only readers whose deadline is no later join.
    Each further reader has a `Ticket` with its own deadline and request id. An abort of the first caller's id ends the
    request in the engine only if it has no other reader.
    """

    def __init__(
        self, source: RequestStream, request: Request, until_s: float, on_change: Callable[[SharedAnswer], None]
    ) -> None:
        """request: with the priority that the engine got. until_s: its deadline in seconds of the event loop's clock,
        or infinity. on_change: called at the first token and at the end."""
        self.first = Ticket(replace(request, deadline_s=None))
        self.first.unread = source.unread
        self.first.on_ticket_end = self._reader_ended
        self.until_s = until_s
        self.scope = ""  # of the prompt in the prefix cache
        self.is_computed = asyncio.Event()  # the prompt, or the request has ended
        self.cached_tokens: int | None = None  # of the prompt, once it is scheduled
        self.ttft_ms: float | None = None  # once the prompt is computed; infinite if no token was asked for
        self.ended = self._started = self._has_tokens = False
        self._began_s = time.monotonic()
        self._source, self._on_change = source, on_change
        self.priority = request.priority
        self._history: list[RequestEvent] = []
        self._history_bytes = 0
        self._readers = [self.first]
        self._pump = asyncio.create_task(self._read(), name="completion-run")

    def precedes(self, priority: int, until_s: float) -> bool:
        """Whether the engine schedules this no later than a request of ``priority`` with the deadline ``until_s``."""
        return priority <= self.priority and (self._started or until_s >= self.until_s)

    def may_answer(self, priority: int, until_s: float) -> bool:
        """Whether an equal request of ``priority`` with the deadline ``until_s`` may join."""
        too_late = self._history_bytes > MAX_HISTORY_BYTES
        if too_late or priority > self.priority or until_s > self.until_s:
            return False
        return self._started or until_s == self.until_s

    def join(self, ticket: Ticket) -> None:
        """Pass all events to ``ticket``, from the first one on. Its unread events count against `first`'s limit. The
        request becomes one of the current call, whose log line then has its figures."""
        call = current_call()
        if call is not None and not call.many and self._source.record is not None:
            call.requests.append(self._source.record)
        ticket.unread = self._source.unread
        ticket.on_ticket_end = self._reader_ended
        self._readers.append(ticket)
        self._source.abort_reader = self._abort_first
        for event in self._history:
            ticket.push(copy(event))

    def _abort_first(self) -> bool:
        return self.first.abort_reader is not None and self.first.abort_reader()

    def _reader_ended(self, ticket: Ticket) -> None:
        if ticket in self._readers:
            self._readers.remove(ticket)
        if self._readers == [self.first]:
            self._source.abort_reader = None
        if not self._readers and not self.ended:
            self._source.close()
            self._pump.cancel()
            self._end()

    async def _read(self) -> None:
        error: RequestError | None = None
        try:
            while True:
                self._take(await anext(self._source))
        except StopAsyncIteration:
            pass  # all events were read
        except RequestError as failure:
            error = failure
        except Exception:
            error = GenerationFailedError("INTERNAL", "the completion's reader broke")
            raise
        finally:
            self._source.close()
            self._end()
            for ticket in list(self._readers):
                if error is None:
                    ticket.complete()
                else:
                    ticket.fail(error)

    def _take(self, event: RequestEvent) -> None:
        self._history_bytes += weight_of(event)
        if self._history_bytes <= MAX_HISTORY_BYTES:
            self._history.append(event)
        else:
            self._history.clear()
        for ticket in list(self._readers):
            ticket.push(copy(event))
        self._started = self._started or isinstance(event, Started | Delta)
        if isinstance(event, Started):
            self.cached_tokens = event.cached_tokens
        elif isinstance(event, Delta) and not self._has_tokens:
            self._has_tokens, self.ttft_ms = True, (time.monotonic() - self._began_s) * 1e3
            self._changed()
        elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH and self.ttft_ms is None:
            self.ttft_ms = math.inf

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._changed()

    def _changed(self) -> None:
        self._on_change(self)
        self.is_computed.set()


SHORTEST_SHARED = 64  # tokens of a prompt; the prefix cache, which shares whole pages, gains nothing from shorter ones


class RequestCoalescer:
    """Submits requests that come one by one, as editors send them, so that their work is shared.

    A request that would get the answer of one in flight joins it; a request whose prompt is being computed waits until
    the prefix cache has it. Callers share with their own tenant and cache salt only.

    A request never waits for a less important one: the priority and the deadline of a request in the engine are fixed,
    so a request of higher priority than its twin is submitted itself, and so is one with a nearer deadline while
    the twin is not scheduled. Both get the same tokens, and share cached pages. Nor does a request wait for the prompt
    of one with a grammar, which may take longer to compile than the prompt to compute.
    """

    def __init__(self, admission: Admission, times: TimeBudget | None = None) -> None:
        """times: learns from the requests that it limits."""
        self._admission, self._times = admission, times
        self._equal: dict[Hashable, SharedAnswer] = {}
        self._prompts: dict[Hashable, SharedAnswer] = {}
        self._runs: set[SharedAnswer] = set()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Requests in the engine that have not ended."""
        return len(self._runs)

    async def start(
        self, principal: Principal, request: Request, supersedes_key: str = ""
    ) -> tuple[CoalescedRequest, bool]:
        """Admit ``request``; returns the caller's view of it, to be left, and whether it joined another's.

        Raises:
            RequestError: the request is refused.
        """
        owner = (principal.tenant, request.cache_salt)
        equal = None if supersedes_key else _equal_key(request)
        prompt = (owner, request.prompt_ids) if len(request.prompt_ids) > SHORTEST_SHARED else None
        priority = principal.scope_request(request).priority
        until_s = asyncio.get_running_loop().time() + (math.inf if request.deadline_s is None else request.deadline_s)
        twin = None if equal is None else self._equal.get((owner, equal))
        if twin is not None and twin.may_answer(priority, until_s):
            ticket = self._admission.join(principal, request)
            twin.join(ticket)
            return CoalescedRequest(ticket), True
        first = None if prompt is None else self._prompts.get(prompt)
        hold = first is not None and first.precedes(priority, until_s)
        source = self._admission.admit(principal, request, supersedes_key, hold=hold)
        run = SharedAnswer(source, replace(request, priority=priority), until_s, self._changed)
        run.scope = principal.scoped(request.cache_salt)
        self._runs.add(run)
        if equal is not None:
            self._equal[owner, equal] = run
        if prompt is not None and hold:
            release = asyncio.create_task(self._release(run, source, prompt), name="coalesced-release")
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        elif prompt is not None and request.grammar is None:
            self._prompts[prompt] = run
        return CoalescedRequest(run.first), False

    async def _release(self, run: SharedAnswer, source: RequestStream, prompt: Hashable) -> None:
        """Give a held request to the engine once no other computes its prompt, or for its end once it is late."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(None if math.isinf(run.until_s) else run.until_s):
                while not run.ended and (first := self._prompts.get(prompt)) is not None:
                    if not first.precedes(run.priority, run.until_s):
                        break
                    await first.is_computed.wait()
        if not run.ended:
            if run.first.request.grammar is None:
                self._prompts.setdefault(prompt, run)
            self._admission.release(source)

    def _changed(self, run: SharedAnswer) -> None:
        for prompt in [prompt for prompt, first in self._prompts.items() if first is run]:
            del self._prompts[prompt]
        if self._times is not None and run.ttft_ms is not None and run.cached_tokens is not None:
            self._times.observe(run.scope, run.first.request, run.cached_tokens, run.ttft_ms)
            run.ttft_ms = None
        if run.ended:
            self._runs.discard(run)
            for equal in [equal for equal, other in self._equal.items() if other is run]:
                del self._equal[equal]


def _equal_key(request: Request) -> Request | None:
    """All of ``request`` that decides about its answer; None where chance or the clock decides too."""
    stopping = request.stopping
    chance = request.sampling.temperature != 0 and request.sampling.seed is None
    if chance or stopping.time_limit_s is not None or stopping.decode_limit_s is not None:
        return None
    return replace(
        request, request_id="", speculation=SpeculationParams(), priority=0, deadline_s=None, prediction_ids=(),
        session="", target_tpot_ms=None, omitted=None,
    )  # fmt: skip
