"""A scheduler with a cache and a minimal engine, which computes what the plan schedules and emits one token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specdec.control.estimates.costs import CostTable
from specdec.control.prefill_pace import DecodeLoad, PrefillPace
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import Sequence
from specdec.engine.scheduler import PlanEntry, Scheduler, SchedulerLimits, StepPlan
from tests.core.kv_cache.sequences import make_request, make_samples, text


def rows_of(entry: PlanEntry) -> int:
    """Maximum rows in the forward."""
    return entry.prefill + 1 + entry.nodes if entry.samples else entry.prefill


def queued(scheduler: Scheduler) -> list[Sequence]:
    """Waiting sequences, most important first."""
    return scheduler._waiting


class Unpaced(PrefillPace):
    """Allows the longest chunk in every step."""

    def rows(self, load: DecodeLoad, prompts: int, context: float, most: int) -> int:
        return most


UNPACED = Unpaced(CostTable.guess(1))


class Rig:
    """Sizes default to roomy; a test narrows the one it is about. ``now`` is the clock."""

    def __init__(
        self,
        pages: int = 64,
        max_batch: int = 8,
        max_step_rows: int = 256,
        prefill_chunk: int = 192,
        max_context: int = 1024,
        max_queued: int = 64,
        prefix_cache: bool = True,
        pace: PrefillPace = UNPACED,
    ) -> None:
        self.now = 100.0
        self.kv = KvCacheManager(pages, prefix_cache=prefix_cache)
        limits = SchedulerLimits(max_batch, max_step_rows, prefill_chunk, min(max_context, pages * 64), max_queued)
        self.scheduler = Scheduler(self.kv, limits, pace, clock=lambda: self.now)
        self._requests = 0

    def add(
        self,
        length: int,
        *,
        priority: int = 0,
        n: int = 1,
        seed: int | None = None,
        max_tokens: int | None = None,
        deadline_s: float | None = None,
    ) -> list[Sequence]:
        """Queue a request of ``length`` prompt tokens. Texts differ unless they share a ``seed``."""
        self._requests += 1
        tokens = text(length, self._requests if seed is None else seed)
        request = make_request(tokens, "", priority, n, max_tokens, f"r{self._requests}")
        samples = make_samples(dataclasses.replace(request, deadline_s=deadline_s), self.now)
        self.scheduler.add(samples)
        return samples

    def plan(self, want: int | Callable[[Sequence], int] = 0) -> StepPlan:
        return self.scheduler.plan(want if callable(want) else lambda seq: want)

    def commit(self, plan: StepPlan, emit: int = 1) -> None:
        """Compute the rows; a sampling sequence emits ``emit`` tokens, at most one more than its nodes."""
        for entry in plan.entries:
            seq = entry.seq
            seq.n_computed += entry.prefill
            if entry.samples:
                count = min(emit, entry.nodes + 1)
                seq.tokens += [len(seq.tokens)] * count
                seq.n_computed += count
            self.kv.publish(seq)

    def step(self, want: int = 0, emit: int = 1) -> StepPlan:
        plan = self.plan(want)
        self.commit(plan, emit)
        return plan

    def until(self, done: Callable[[], bool]) -> StepPlan:
        """Step until ``done``; the last plan."""
        for _ in range(1000):
            plan = self.step()
            if done():
                return plan
        raise AssertionError("1000 steps were not enough")

    def start(self, length: int, *, priority: int = 0, seed: int | None = None) -> Sequence:
        """A request that is past its prompt and decodes."""
        (seq,) = self.add(length, priority=priority, seed=seed)
        self.until(lambda: seq.n_output > 0)
        return seq

    def squeeze(self, left: int = 0) -> Sequence:
        """Take all available pages but ``left``, as if by a sequence unknown to the scheduler, which it returns."""
        hog = make_samples(make_request([0], name="hog"))[0]
        assert self.kv.ensure(hog, (self.kv.n_free - left) * 64)
        return hog

    def entry(self, plan: StepPlan, seq: Sequence) -> PlanEntry:
        (entry,) = [e for e in plan.entries if e.seq is seq]
        return entry
