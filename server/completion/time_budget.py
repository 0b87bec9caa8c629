"""Prompts for an objective of time to first token: as much text as is computed in that time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from server.admission import Admission
from server.completion.documents import common_length
from server.completion.prompt_packer import PackedPrompt
from server.engine_client import EngineClient
from server.request_stream import RequestStream
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent, Started
from verify_kernels.forward_batch import PAGE_SIZE

QUANTUM, FINE_BUDGET = 32, 256  # tokens: the step between small budgets, and the largest of these
FIRST_AHEAD = 128  # tokens: the smallest budget that is read ahead
COARSE_RATIO = 4  # of larger budgets to the next one below
WARM_SHARE = 0.5  # of a prompt that must be cached for it to be preferred to a longer one


def budgets(largest: int) -> Iterator[int]:
    """Budgets in tokens, in descending order from ``largest`` on.

    There are few, so that a prompt starts at the same place while the measured times drift, and reading ahead visits
    each large one once.
    """
    budget = largest
    while budget > FINE_BUDGET:
        yield budget
        budget = max(budget // COARSE_RATIO, FINE_BUDGET)
    yield budget
    yield from range((budget - 1) // QUANTUM * QUANTUM, 0, -QUANTUM)


PROMPTS_PER_OWNER = 16
MOST_TOKENS = 1 << 18  # of all prompts that are remembered; a token takes up to 36 bytes


class ComputedPrompts:
    """The latest prompts in the prefix cache, by owner. The engine is not asked: its next answer shows that it has
    evicted one. The prefix cache shares whole pages, and a prompt's last part with prompts that continue it."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self.n_tokens = 0  # of all prompts, at most `MOST_TOKENS`

    def add(self, owner: str, ids: tuple[int, ...]) -> None:
        """Add a prompt that was computed. It replaces the ones that it continues, and the last, partial page of others
        with the same whole pages: the cache keeps one behind each page."""
        prompts = self.forget(owner)
        for old in list(prompts):
            whole = len(old) // PAGE_SIZE * PAGE_SIZE
            if ids[:whole] == old[:whole]:
                del prompts[old]
                if whole and ids[: len(old)] != old:
                    prompts[old[:whole]] = None
        prompts[ids] = None
        while len(prompts) > PROMPTS_PER_OWNER or (prompts and _total(prompts) > MOST_TOKENS):
            prompts.popitem(last=False)
        self._by_owner[owner] = prompts
        self.n_tokens += _total(prompts)
        while self.n_tokens > MOST_TOKENS:
            self.forget(next(iter(self._by_owner)))

    def forget(self, owner: str) -> OrderedDict[tuple[int, ...], None]:
        """Drop the prompts of an owner, and return them."""
        prompts = self._by_owner.pop(owner, OrderedDict())
        self.n_tokens -= _total(prompts)
        return prompts

    def of(self, owner: str) -> tuple[tuple[int, ...], ...]:
        return tuple(self._by_owner.get(owner, ()))


def _total(prompts: Iterable[tuple[int, ...]]) -> int:
    return sum(map(len, prompts))


def cached_tokens(prompts: Iterable[tuple[int, ...]], ids: tuple[int, ...]) -> int:
    """The leading tokens of ``ids`` that a prefix cache with ``prompts`` holds."""
    most = 0
    for known in prompts:
        equal = common_length(known, ids)
        most = max(most, equal if equal == len(known) else equal // PAGE_SIZE * PAGE_SIZE)
    return most


@dataclass(frozen=True, slots=True)
class Objective:
    """The time to first token that a request asks for, and what decides about its prompt at that moment."""

    allowed_ms: float  # from now on
    times: tuple[float, ...]  # by k: expected milliseconds of 4^k prompt tokens; empty: unknown
    known: tuple[tuple[int, ...], ...]  # prompts in the prefix cache
    wait_s: Callable[[float], float] = lambda tokens: 0.0  # in the queue, by the tokens that the engine must compute

    def choose(self, pack: Callable[[int], PackedPrompt], largest: int) -> PackedPrompt:
        """The prompt of the largest of `budgets` that is expected to give its first text in time, or of the smallest.
        Instead of it, one of at least half its budget that is mostly cached: it saves work.

        pack: makes the prompt within a budget.
        """
        chosen: PackedPrompt | None = None
        least = 0.0  # budget of the prompts that are preferred if they are cached
        for budget in budgets(largest):
            if budget < least:
                break
            prompt = pack(budget)
            cached = cached_tokens(self.known, prompt.ids)
            more = max(1, len(prompt.ids) - cached)
            fits = expected_ms(self.times, more) + prompt.n_healing_tokens * expected_ms(self.times, 1)
            fits += 1e3 * self.wait_s(more)
            if fits <= self.allowed_ms and cached >= WARM_SHARE * len(prompt.ids):
                return prompt
            if fits <= self.allowed_ms and chosen is None:
                chosen, least = prompt, budget / 2
        return prompt if chosen is None else chosen


def expected_ms(times: Sequence[float], tokens: int) -> float:
    """Milliseconds to compute ``tokens`` tokens by ``times``, as in `Objective`; 0 if they are unknown."""
    if not times:
        return 0.0
    at = next((k for k in range(1, len(times)) if tokens <= 4**k), len(times) - 1)
    slope = (times[at] - times[at - 1]) / (4**at - 4 ** (at - 1))
    return times[at - 1] + slope * (tokens - 4 ** (at - 1))


SLOWER_WEIGHT, FASTER_WEIGHT = 0.3, 0.1  # so that about three of four requests meet the objective
LEAST_SLOWDOWN, MOST_SLOWDOWN = 0.5, 16.0
LEAST_OBSERVED = QUANTUM // 2  # computed tokens; the time of fewer is mostly not theirs
PART_MS = 100.0  # expected time of a part of a prompt that is read ahead: the longest delay of another request
LEAST_PART, LARGEST_PART = 8, 512  # tokens of such a part


@dataclass(slots=True)
class TimeBudget:
    """Makes objectives from the engine's measured times and what its prefix cache holds. Belongs to one event loop.

    ``slowdown`` is the time that prompts took over what the engine expects of a prompt that runs alone: it covers other
    requests, the server and changes of the machine's speed.
    """

    client: EngineClient
    admission: Admission
    computed: ComputedPrompts = field(default_factory=ComputedPrompts)
    slowdown: float = 1.0

    def objective(self, owner: str, ttft_ms: float | None) -> Objective | None:
        """The objective of a request that is submitted now; None: it has none. owner: scope of the prefix cache."""
        if ttft_ms is None:
            return None
        return Objective(ttft_ms, self._times(), self.computed.of(owner), self.admission.forecast_s)

    def part(self) -> int:
        """Tokens of a part of a prompt that is read ahead."""
        times = self._times()
        fitting = (n for n in range(LARGEST_PART, LEAST_PART, -LEAST_PART) if expected_ms(times, n) <= PART_MS)
        return next(fitting, LEAST_PART)

    def watch(self, stream: RequestStream, owner: str) -> None:
        """Update from the request of ``stream``, submitted now, once its prompt is computed, read or not."""
        begun_s, cached = time.monotonic(), 0

        def saw(event: RequestEvent) -> None:
            nonlocal begun_s, cached
            if isinstance(event, Started):
                cached = event.cached_tokens
                begun_s += event.queue_ms / 1e3  # the wait for a place, or for another's prompt, is not its time
                return
            stream.watcher = None
            if isinstance(event, Delta):
                self.observe(owner, stream.request, cached, (time.monotonic() - begun_s) * 1e3)
            elif isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
                self.observe(owner, stream.request, cached, math.inf)

        stream.watcher = saw

    def observe(self, owner: str, request: Request, cached: int, ttft_ms: float) -> None:
        """Update from a request with an objective whose prompt was computed. cached: tokens that the engine had in its
        cache. ttft_ms: from its first step to its first token; infinite if it asks for none."""
        ids, computed = request.prompt_ids, self.computed
        if cached + PAGE_SIZE < cached_tokens(computed.of(owner), ids):
            computed.forget(owner)
        computed.add(owner, ids)
        more = len(ids) - cached
        expected = expected_ms(self._times(), more)
        if more >= LEAST_OBSERVED and expected and math.isfinite(ttft_ms):
            measured = min(max(self.slowdown * ttft_ms / expected, LEAST_SLOWDOWN), MOST_SLOWDOWN)
            weight = SLOWER_WEIGHT if measured > self.slowdown else FASTER_WEIGHT
            self.slowdown += weight * (measured - self.slowdown)

    def _times(self) -> tuple[float, ...]:
        return tuple(self.slowdown * ms for ms in self.client.engine.load.prompt_ms)
