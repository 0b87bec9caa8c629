"""An engine without a model: it writes what a page slot would store, and checks every promise of the scheduler.

The KV of a token depends on all tokens before it, so a slot's content is a hash chained from the salt. If a page ever
shows a sequence content of another chain, sharing, eviction or preemption went wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest

from specdec.core.kv_cache import KvCacheManager, pages_for
from specdec.core.sequence import Sequence, SequencePhase
from specdec.core.types import Request, SamplingParams, StoppingParams
from specdec.engine.scheduler import PlanEntry, Scheduler, SchedulerLimits, StepPlan
from specdec.errors import QueueFullError
from tests.core.kv_cache.invariants import cached_pages, check_pages
from tests.engine.scheduler.rig import UNPACED, queued, rows_of
from tests.sequences import new_sequence
from verify_kernels.forward_batch import PAGE_SIZE

BLOCKS = [random.Random(seed).choices(range(9), k=PAGE_SIZE) for seed in range(3)]
# Texts of equal pages in different order, so that a page is tempting after the wrong beginning too.
TEXTS = [[token for block in order for token in BLOCKS[int(block)]] for order in ("0120120", "0210210", "1110122")]
REJECTED = -1  # left in its slot by a draft node that was not accepted


@dataclass(frozen=True)
class Snapshot:
    """The state before plan()."""

    running: list[Sequence]
    decoding: set[Sequence]
    missing: int  # pages that the decoding sequences need for their next row
    available: int  # pages free, or held only for drafts
    short: Sequence | None  # the first in line that is due, if it can't have the pages it needs


STEP_S = 0.4  # so that some wait until they are due


class FakeEngine:
    """``rng`` decides everything the caller does not. ``pages`` also bounds the context."""

    def __init__(self, rng: random.Random, pages: int, prefix_cache: bool = True, **limits: int) -> None:
        self.rng = rng
        self.kv = KvCacheManager(pages, prefix_cache=prefix_cache)
        self.limits = SchedulerLimits(
            max_batch=limits.get("max_batch", 4),
            max_step_rows=limits.get("max_step_rows", 64),
            prefill_chunk=limits.get("prefill_chunk", 48),
            max_context=min(limits.get("max_context", 400), pages * PAGE_SIZE),
            max_queued=limits.get("max_queued", 8),
        )
        self.now = 0.0
        self.scheduler = Scheduler(self.kv, self.limits, UNPACED, clock=lambda: self.now)
        self.live: list[Sequence] = []
        self.room: dict[Sequence, int] = {}  # tokens each may still emit
        self.chain: dict[Sequence, list[int]] = {}  # the expected content of each token's slot
        self.target = [[0] * PAGE_SIZE for _ in range(pages)]
        self.draft = [[0] * PAGE_SIZE for _ in range(pages)]
        self.wanted: dict[Sequence, int] = {}

    def add(self, length: int, text: int, salt: str, priority: int, n: int, room: int) -> bool:
        """Queue a request for the first ``length`` tokens of one of few texts, so that prefixes recur."""
        length = min(length, self.limits.max_context)
        stopping = StoppingParams(max_tokens=room)
        request = Request(
            "r", tuple(TEXTS[text][:length]), SamplingParams(n=n), stopping, priority=priority, cache_salt=salt
        )
        samples = [new_sequence(request, index, arrival_s=self.now) for index in range(n)]
        place_free = len(self.scheduler.running) < self.limits.max_batch
        if self.scheduler.n_waiting_requests >= max(self.limits.max_queued, int(place_free)):
            with pytest.raises(QueueFullError):
                self.scheduler.add(samples)
            return False
        self.scheduler.add(samples)
        for seq in samples:
            self.live.append(seq)
            self.room[seq] = room
            self.chain[seq] = []
            self._extend_chain(seq)
        return True

    def finish(self, seq: Sequence) -> None:
        self.scheduler.finish(seq)
        self.scheduler.finish(seq)
        assert seq.phase is SequencePhase.FINISHED
        assert seq.pages == []
        self.live.remove(seq)

    def plan(self, most: int) -> StepPlan:
        """Plan a step in which sequences want up to ``most`` nodes, and check the plan."""
        self.now += STEP_S
        before = self._snapshot()
        waiting = {seq: self._may_be_held(seq) for seq in queued(self.scheduler)}
        self.wanted = {}
        plan = self.scheduler.plan(lambda seq: self.wanted.setdefault(seq, self.rng.randint(0, most)))
        self._check_bounds(plan)
        self._check_entries(plan.entries)
        self._check_decodes(plan, before)
        self._check_admissions(plan, waiting, before)
        self._check_paused(plan, before)
        for seq in plan.prefilled:
            assert seq.prefill_only
            assert not seq.prefilling
        return plan

    def step(self, most: int = 4) -> None:
        """A step that goes well."""
        had_work = bool(self.live)
        plan = self.plan(most)
        assert plan.entries or plan.prefilled or plan.preempted or not had_work, "work, but nothing planned"
        self._write(plan)
        for entry in plan.entries:
            self._commit(entry)
        for seq in [s for s in self.live if s in plan.prefilled]:
            self.finish(seq)

    def broken_step(self, most: int, retry: bool) -> None:
        """The forward fails: slots are written, nothing is committed; the engine tries again, or fails some."""
        plan = self.plan(most)
        self._write(plan)
        for entry in [] if retry else plan.entries[: 1 + len(plan.entries) // 2]:
            self.finish(entry.seq)

    def broken_want(self) -> None:
        """The budget raises in the middle of planning."""

        def want(seq: Sequence) -> int:
            if self.rng.random() < 0.5:
                raise ZeroDivisionError
            return 3

        try:
            self.scheduler.plan(want)
        except ZeroDivisionError:
            assert self.scheduler.running

    def check(self) -> None:
        """Check that the block tables are consistent, and that every computed slot of a running sequence matches its
        tokens."""
        check_pages(self.kv, self.live, self.chain)
        assert set(self.scheduler.running) | set(queued(self.scheduler)) == set(self.live)
        assert len(self.scheduler.running) + len(queued(self.scheduler)) == len(self.live)
        for seq in self.live:
            if seq.phase is SequencePhase.WAITING:
                assert (seq.pages, seq.n_computed, seq.draft_computed) == ([], 0, 0)
                continue
            assert 0 <= seq.n_computed <= len(seq.tokens) - 1
            self._check_content(seq, self.target, seq.n_computed)
            self._check_content(seq, self.draft, seq.draft_computed)

    def drain(self) -> None:
        """Run to the end. Every step must make progress, so that no request starves."""
        rows = sum(len(seq.tokens) + self.room[seq] for seq in self.live)
        for _ in range(20 + rows * (1 + len(self.live))):
            if not self.live:
                break
            self.step()
            self.check()
        assert not self.live, f"starved: {self.live}"
        assert self.kv.n_free == self.kv.n_total
        check_pages(self.kv, [], self.chain)
        self.kv.flush()
        assert (cached_pages(self.kv), self.kv.n_free) == (0, self.kv.n_total)

    def _snapshot(self) -> Snapshot:
        running = list(self.scheduler.running)
        decoding = {s for s in running if not s.prefilling and not s.prefill_only}
        missing = sum(max(0, pages_for(len(s.tokens)) - len(s.pages)) for s in decoding)
        spare = sum(max(0, len(s.pages) - pages_for(len(s.tokens))) for s in running)
        due = [s for s in queued(self.scheduler) if s.n_output or self.now >= s.due_s]
        first = min(due, key=lambda s: s.rank, default=None)
        short = first is not None and not self.kv.fits(first, reserve=len(running) - spare)
        return Snapshot(running, decoding, missing, self.kv.n_free + spare, first if short else None)

    def _check_bounds(self, plan: StepPlan) -> None:
        limits, entries = self.limits, plan.entries
        assert len(self.scheduler.running) <= limits.max_batch
        assert sum(rows_of(e) for e in entries) <= limits.max_step_rows
        assert sum(e.prefill for e in entries) <= limits.prefill_chunk
        assert len({e.seq for e in entries}) == len(entries)

    def _check_entries(self, entries: Seq[PlanEntry]) -> None:
        holders = Counter(page for seq in self.live for page in seq.pages)
        for entry in entries:
            seq, start = entry.seq, entry.seq.n_computed
            assert seq.phase is SequencePhase.RUNNING
            assert rows_of(entry) >= 1
            assert start + rows_of(entry) <= min(self.limits.max_context, len(seq.pages) * PAGE_SIZE)
            if entry.samples:
                assert start + entry.prefill == len(seq.tokens) - 1
                assert 0 <= entry.nodes <= self.wanted.get(seq, 0)
                assert not seq.prefill_only
            else:
                assert entry.nodes == 0
                assert start + entry.prefill <= len(seq.tokens) - 1
            for page in seq.pages[start // PAGE_SIZE : pages_for(start + rows_of(entry))]:
                assert holders[page] == 1, "a page to be written is shared"

    def _check_decodes(self, plan: StepPlan, before: Snapshot) -> None:
        kept = [s for s in before.running if s not in plan.paused]
        stay = [s for s in kept if s not in plan.preempted]
        assert kept == stay + plan.preempted[::-1], "the victims are not the least important, last first"
        assert bool(plan.preempted) == (before.missing > before.available), "preemption only where pages run out"
        sampling = {e.seq for e in plan.entries if e.samples}
        assert before.decoding - set(plan.preempted) <= sampling, "a decoding sequence got no row"
        assert not set(plan.preempted) & (sampling | set(plan.admitted))

    def _check_admissions(self, plan: StepPlan, waiting: dict[Sequence, bool], before: Snapshot) -> None:
        left = [s for s in queued(self.scheduler) if not waiting.get(s, True)]
        overtaken = before.short is not None and any(seq.rank > before.short.rank for seq in plan.admitted)
        assert not overtaken, "overtaken, though due and short of pages"
        for seq in plan.admitted:
            assert seq in waiting
            assert all(seq.request.priority >= other.request.priority for other in left), "overtaken by the less urgent"
            assert len(seq.pages) * PAGE_SIZE >= len(seq.tokens)
        if plan.admitted:
            assert self.kv.n_free + sum(map(self._draft_pages, self.live)) >= len(self.scheduler.running) - len(
                plan.admitted
            )

    def _check_paused(self, plan: StepPlan, before: Snapshot) -> None:
        for seq in plan.paused:
            assert self.kv.prefix_cache
            assert seq in before.running
            assert seq not in before.decoding
            assert seq not in plan.admitted + plan.preempted + [entry.seq for entry in plan.entries]
            assert len(self.scheduler.running) == self.limits.max_batch
            assert all(seq.request.priority <= other.request.priority for other in plan.admitted)
            if all(seq.request.priority == other.request.priority for other in plan.admitted):
                reading = [s for s in before.running if s not in before.decoding]
                ahead = [s for s in reading if s.request.priority == seq.request.priority and s.rank < seq.rank]
                assert ahead, "the first in line lost its place"

    def _draft_pages(self, seq: Sequence) -> int:
        return max(0, len(seq.pages) - pages_for(len(seq.tokens)))

    def _may_be_held(self, seq: Sequence) -> bool:
        """Whether another sequence, which may be running by the end of the plan, is yet to compute pages for it."""
        alike = [s for s in self.live if s.rank < seq.rank and s.salt == seq.salt and s.n_computed < len(s.tokens) - 1]
        return any(s.tokens[:PAGE_SIZE] == seq.tokens[:PAGE_SIZE] for s in alike)

    def _write(self, plan: StepPlan) -> None:
        """The slots written by the forward: the chain's KV, then the tree's."""
        for entry in plan.entries:
            seq, start = entry.seq, entry.seq.n_computed
            committed = entry.prefill + int(entry.samples)
            for i in range(rows_of(entry)):
                content = self.chain[seq][start + i] if i < committed else REJECTED
                self.target[seq.pages[(start + i) // PAGE_SIZE]][(start + i) % PAGE_SIZE] = content

    def _commit(self, entry: PlanEntry) -> None:
        seq = entry.seq
        first = seq.n_computed + entry.prefill
        seq.n_computed = first
        if entry.samples:
            taken = min(self.rng.randint(1, entry.nodes + 1), self.room[seq])
            taken = min(taken, max(1, self.limits.max_context - len(seq.tokens)))
            seq.tokens += [self.rng.randint(0, 1) for _ in range(taken)]
            self._extend_chain(seq)
            for slot in range(first + 1, first + taken):  # accepted nodes move to their place
                self.target[seq.pages[slot // PAGE_SIZE]][slot % PAGE_SIZE] = self.chain[seq][slot]
            seq.n_computed = first + taken
            self.room[seq] -= taken
        self._draft_catches_up(seq)
        self.kv.publish(seq)
        full = len(seq.tokens) >= self.limits.max_context
        if (seq.prefill_only and not seq.prefilling) or (entry.samples and (self.room[seq] <= 0 or full)):
            self.finish(seq)

    def _draft_catches_up(self, seq: Sequence) -> None:
        until = self.rng.choice([seq.draft_computed, seq.n_computed, (seq.draft_computed + seq.n_computed) // 2])
        for slot in range(seq.draft_computed, until):
            self.draft[seq.pages[slot // PAGE_SIZE]][slot % PAGE_SIZE] = self.chain[seq][slot]
        seq.draft_computed = max(seq.draft_computed, until)

    def _extend_chain(self, seq: Sequence) -> None:
        chain = self.chain[seq]
        for token in seq.tokens[len(chain) :]:
            chain.append(hash((chain[-1] if chain else seq.salt, token)))

    def _check_content(self, seq: Sequence, pool: list[list[int]], n_tokens: int) -> None:
        chain = self.chain[seq]
        assert len(seq.pages) * PAGE_SIZE >= n_tokens
        for i, page in enumerate(seq.pages[: pages_for(n_tokens)]):
            size = min(PAGE_SIZE, n_tokens - i * PAGE_SIZE)
            assert pool[page][:size] == chain[i * PAGE_SIZE : i * PAGE_SIZE + size], f"page {page} is not {seq}'s"
