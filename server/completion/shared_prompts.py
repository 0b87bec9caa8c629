"""Equal prompts in flight are computed once: a request waits while another computes its prompt, and then finds it in
the prefix cache.

Every request is admitted first: limits of the queue and of keys, and its own deadline, hold for it whether it is
submitted at once or waits for a prompt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Hashable

from server.admission import Admission
from server.auth.principal import Principal
from server.completion.time_budget import TimeBudget
from server.request_stream import RequestStream
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent, Started


class CompletionRun:
    """An admitted request: its events, the text and end of sample 0, and the state of its prompt. Call `leave` after
    reading."""

    def __init__(
        self, source: RequestStream, owner: str, until_s: float, on_computed: Callable[[CompletionRun], None]
    ) -> None:
        """on_computed: called once the prompt is computed or the request has ended, however slow the reader is."""
        self.text = ""  # of sample 0, as far as it was read
        self.has_tokens = False  # of any sample, as far as they were read
        self.finished: Finished | None = None  # of sample 0
        self.source = source
        self.owner = owner  # the caller's scope of the prefix cache, also where an experiment's arm sets another salt
        self.until_s = until_s  # when its deadline or time limit ends it, by the event loop's clock, or infinity
        self.is_computed = asyncio.Event()  # the prompt, or the request has ended
        self.cached_tokens: int | None = None  # of the prompt, once it is scheduled
        self.submitted_s = time.monotonic()  # when the engine got it
        self.ttft_ms: float | None = None  # from then until the prompt is computed; infinite if no token is asked for
        self._on_computed = on_computed
        source.watcher = self._saw

    def precedes(self, priority: int, until_s: float) -> bool:
        """Whether a request of ``priority``, whose deadline or time limit is ``until_s``, may wait for this one. It may
        if this one's priority is as high or higher, and this one is scheduled already or ends no later."""
        is_scheduled = self.cached_tokens is not None
        return priority <= self.source.request.priority and (is_scheduled or until_s >= self.until_s)

    def leave(self) -> None:
        """Stop reading, which ends the request."""
        self.source.close()

    async def read(self) -> AsyncGenerator[RequestEvent]:
        """The events from the first one on; iterate once.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        async for event in self.source:
            if isinstance(event, Delta):
                self.has_tokens = True
                if event.index == 0:
                    self.text += event.text
            elif isinstance(event, Finished) and event.index == 0:
                self.finished = event
            yield event

    def _saw(self, event: RequestEvent | None) -> None:
        if self.is_computed.is_set():
            return
        if isinstance(event, Started):
            self.cached_tokens = event.cached_tokens
            return
        if isinstance(event, Delta):
            self.ttft_ms = (time.monotonic() - self.submitted_s) * 1e3
        elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
            self.ttft_ms = math.inf
        self.is_computed.set()
        self._on_computed(self)


SHORTEST_SHARED = 64  # tokens of a prompt; the prefix cache, which shares whole pages, gains nothing from shorter ones


class SharedPrompts:
    """Submits requests that come one by one, as editors send them. One whose prompt is being computed waits until the
    prefix cache has it. Callers share with their own tenant and cache salt only.

    A request never waits for a less important one: the priority and the deadline of a request in the engine are fixed,
    so a request of higher priority than the one that computes its prompt is submitted at once, and so is one that ends
    earlier while the other is not scheduled. Both use the cached pages. Nor does a request wait for the prompt of one
    with a grammar, which may take longer to compile than the prompt to compute.
    """

    def __init__(self, admission: Admission, times: TimeBudget | None = None, prefix_cache: bool = True) -> None:
        """times: learns from the requests that it limits. prefix_cache: the engine has one; else no request waits."""
        self._admission, self._times, self._prefix_cache = admission, times, prefix_cache
        self._computing: dict[Hashable, CompletionRun] = {}  # by prompt: the run that others wait for
        self._releases: set[asyncio.Task[None]] = set()

    def start(self, principal: Principal, request: Request, supersedes_key: str = "") -> CompletionRun:
        """Admit ``request`` and submit it, now or once its prompt is computed; returns its run, to be left.

        Raises:
            RequestError: the request is refused.
        """
        scoped = principal.scope_request(request)
        limits_s = (request.deadline_s, request.stopping.time_limit_s)
        until_s = asyncio.get_running_loop().time() + min((s for s in limits_s if s is not None), default=math.inf)
        first = self._computing.get(_prompt(scoped))
        hold = first is not None and first.precedes(scoped.priority, until_s)
        source = self._admission.admit(principal, request, supersedes_key, hold=hold)
        run = CompletionRun(source, scoped.cache_salt, until_s, self._computed)
        if hold:
            release = asyncio.create_task(self._release(run), name="prompt-release")
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        elif self._prefix_cache and len(scoped.prompt_ids) > SHORTEST_SHARED and scoped.grammar is None:
            self._computing[_prompt(source.request)] = run
        return run

    async def _release(self, run: CompletionRun) -> None:
        """Give a held request to the engine once its prompt is cached or no other computes it."""
        request, is_cached = run.source.request, False
        while run.source.is_open and (first := self._computing.get(_prompt(request))) is not None:
            if not first.precedes(request.priority, run.until_s):
                break
            await first.is_computed.wait()
            if is_cached := first.ttft_ms is not None:
                break
        if run.source.is_open:
            if request.grammar is None and not is_cached:
                self._computing.setdefault(_prompt(request), run)
            run.submitted_s = time.monotonic()
            self._admission.release(run.source)

    def _computed(self, run: CompletionRun) -> None:
        request = run.source.request
        if self._computing.get(_prompt(request)) is run:
            del self._computing[_prompt(request)]
        if self._times is not None and run.ttft_ms is not None and run.cached_tokens is not None:
            self._times.observe(run.owner, request, run.cached_tokens, run.ttft_ms)


def _prompt(request: Request) -> Hashable:
    """What requests of one prompt have in common. request: as the engine gets it."""
    return request.cache_salt, request.prompt_ids
