"""Plans steps: every decoding sequence one row, then drafts, then prompts; preempts when pages run out."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq

from specdec.errors import ConfigError, PromptTooLongError, QueueFullError
from specdec.kv_cache import PAGE_SIZE, KvCacheManager
from specdec.scheduler.fair_shares import fair_shares
from specdec.scheduler.limits import SchedulerLimits
from specdec.scheduler.plan_entry import PlanEntry
from specdec.scheduler.retry_estimate import RetryEstimate
from specdec.scheduler.step_plan import StepPlan
from specdec.scheduler.waiting_queue import WaitingQueue
from specdec.sequence import Sequence, SequencePhase

PROMPT_SHARE = 0.75  # of a step's rows that drafts leave to prompts where these need them: most nodes that drafts
# reserve are never verified, and a prompt that is read in two steps instead of one pays for another pass


class Scheduler:
    """Decides who runs. Importance is priority (high first), then arrival.

    What never happens: a running, decoding sequence without its row; a preemption for drafts, for a prompt or for a
    less important sequence; a request overtaken by a later one of its priority because it needs more pages.

    Raises:
        ConfigError: ``max_context`` exceeds what the KV cache holds, so that one sequence could exhaust it alone.
    """

    def __init__(
        self, kv: KvCacheManager, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if limits.max_context > kv.n_total * PAGE_SIZE:
            raise ConfigError(
                f"max_context: {limits.max_context} tokens do not fit a KV cache of {kv.n_total * PAGE_SIZE}; "
                "raise kv_tokens or lower max_context"
            )
        self._kv, self._limits, self._clock = kv, limits, clock
        self._running: list[Sequence] = []
        self._waiting = WaitingQueue()
        self._serial = itertools.count()
        self._to_preempt: list[Sequence] = []
        self._retry = RetryEstimate()

    @property
    def running(self) -> Seq[Sequence]:
        """Sequences in the batch, most important first. A view: do not keep it across a plan."""
        return self._running

    @property
    def waiting(self) -> Seq[Sequence]:
        """Sequences that wait, most important first, siblings held back last."""
        return self._waiting.sequences()

    @property
    def n_waiting_requests(self) -> int:
        """Requests of which nothing runs and something waits."""
        if not self._waiting:
            return 0
        active = {id(seq.request) for seq in self._running}
        return len({id(seq.request) for seq in self._waiting.sequences()} - active)

    @property
    def oldest_wait_s(self) -> float:
        """Seconds since the arrival of the sequence that has waited longest; 0 when none waits."""
        waiting = self._waiting.sequences()
        return max(0.0, self._clock() - min(seq.arrival_s for seq in waiting)) if waiting else 0.0

    def add(self, seqs: Seq[Sequence]) -> None:
        """Queue the samples of one request; all or none.

        Where they would share cached pages, all but the first wait until its prompt is computed.

        Raises:
            PromptTooLongError: the prompt exceeds ``max_context``.
            QueueFullError: ``max_queued`` requests wait (0: nothing may wait unless a place is free).
        """
        leader, *siblings = seqs
        if len(leader.tokens) > self._limits.max_context:
            raise PromptTooLongError(self._limits.max_context, len(leader.tokens))
        place_free = len(self._running) < self._limits.max_batch
        limit = max(self._limits.max_queued, 1 if place_free else 0)
        if self.n_waiting_requests >= limit:
            raise QueueFullError(self._limits.max_queued, self._retry.retry_after_s())
        if not self._running and not self._waiting:
            self._retry.start(self._clock())
        for seq in seqs:
            seq.rank = (-seq.request.priority, next(self._serial))
        self._waiting.push(leader)
        shares_pages = self._kv.prefix_cache and len(leader.tokens) > PAGE_SIZE
        if siblings and shares_pages:
            self._waiting.hold(leader, siblings)
        else:
            for seq in siblings:
                self._waiting.push(seq)

    def finish(self, seq: Sequence) -> None:
        """Take ``seq`` out wherever it is and release its pages, at once. Idempotent."""
        if seq.state is SequencePhase.RUNNING:
            self._running.remove(seq)
            self._retry.completed(self._clock())
        elif seq.state is SequencePhase.WAITING:
            self._waiting.remove(seq)
        seq.state = SequencePhase.FINISHED
        self._kv.release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Let ``seq`` give up its pages at the next plan, as if they had run out; no-op unless it runs then."""
        self._to_preempt.append(seq)

    def plan(self, want: Callable[[Sequence], int]) -> StepPlan:
        """Decide the next step. ``want(seq)``: draft nodes the budget would like for a sequence that samples."""
        self._waiting.let_siblings_in()
        plan = StepPlan()
        for seq in self._to_preempt:
            if seq.state is SequencePhase.RUNNING:
                self._preempt(seq, plan)
        self._to_preempt.clear()
        prefilling = self._plan_decodes(plan)
        rows = self._limits.max_step_rows - len(plan.entries)
        rows -= self._grant_nodes(plan.entries, want, rows - self._rows_for_prompts(prefilling, rows))
        decodes = len(plan.entries)
        rows = self._plan_prefills(plan, prefilling, rows)
        if rows > 0 and len(plan.entries) > decodes:
            self._grant_nodes([entry for entry in plan.entries[decodes:] if entry.samples], want, rows)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """One row for each decoding sequence; returns those that still prefill."""
        prefilling: list[Sequence] = []
        ensure = self._kv.ensure
        for seq in self._running.copy():
            if seq.state is not SequencePhase.RUNNING:
                continue  # preempted in this loop
            if seq.prefilling:
                prefilling.append(seq)
            elif seq.prefill_only:
                plan.prefilled.append(seq)
            elif ensure(seq, len(seq.tokens)) or self._make_room(seq, plan):
                plan.entries.append(PlanEntry(seq, 0, 0, True))
        return prefilling

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """Find a page for ``seq``: take back room for drafts, then preempt from the least important up.

        False when that is ``seq`` itself. Sequences planned already are more important, so never a victim.
        """
        for other in self._running:
            self._kv.trim(other, len(other.tokens))
        while not self._kv.ensure(seq, len(seq.tokens)):
            victim = self._running[-1]
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        self._running.remove(seq)
        self._kv.release(seq)
        seq.n_computed = seq.draft_computed = 0
        seq.preemptions += 1
        seq.state = SequencePhase.WAITING
        self._waiting.push(seq)
        plan.preempted.append(seq)

    def _rows_for_prompts(self, prefilling: list[Sequence], rows: int) -> int:
        """Rows that drafts must leave."""
        limits = self._limits
        cap = min(limits.prefill_chunk, int(limits.max_step_rows * PROMPT_SHARE), rows)
        if self._waiting.head is not None and len(self._running) < limits.max_batch:
            return cap
        return min(cap, sum(len(seq.tokens) - seq.n_computed for seq in prefilling))

    def _grant_nodes(self, entries: list[PlanEntry], want: Callable[[Sequence], int], budget: int) -> int:
        """Divide ``budget`` rows fairly as draft nodes, as far as context and available pages go; returns rows used."""
        if budget <= 0 or not entries:
            return 0
        most = self._limits.max_context - 1
        wishes = [max(0, min(want(e.seq), most - e.seq.n_computed - e.chain)) for e in entries]
        used = 0
        for entry, nodes in zip(entries, fair_shares(wishes, budget), strict=True):
            seq, base = entry.seq, entry.seq.n_computed + entry.chain + 1
            if nodes and not self._kv.ensure(seq, base + nodes):
                self._kv.ensure(seq, (len(seq.pages) + self._kv.n_free) * PAGE_SIZE)
                nodes = max(0, min(nodes, len(seq.pages) * PAGE_SIZE - base))
            entry.nodes = nodes
            used += nodes
        return used

    def _plan_prefills(self, plan: StepPlan, prefilling: list[Sequence], rows: int) -> int:
        """Prompt rows for running sequences, then for newly admitted ones; returns the rows left."""
        chunk = self._limits.prefill_chunk
        for seq in prefilling:
            if chunk <= 0 or rows <= 0:
                return rows
            entry = self._prefill_entry(seq, chunk, rows)
            plan.entries.append(entry)
            chunk, rows = chunk - entry.chain, rows - entry.rows
        while chunk > 0 and rows > 0 and not plan.preempted:
            admitted = self._admit(plan)
            if admitted is None:
                break
            if admitted.prefill_only and not admitted.prefilling:
                plan.prefilled.append(admitted)
                continue
            entry = self._prefill_entry(admitted, chunk, rows)
            plan.entries.append(entry)
            chunk, rows = chunk - entry.chain, rows - entry.rows
        return rows

    @staticmethod
    def _prefill_entry(seq: Sequence, chunk: int, rows: int) -> PlanEntry:
        remaining = len(seq.tokens) - 1 - seq.n_computed
        chain = min(remaining, chunk, rows)
        return PlanEntry(seq, chain, 0, chain == remaining and chain < rows and not seq.prefill_only)

    def _admit(self, plan: StepPlan) -> Sequence | None:
        """Start the head of the queue if a place and pages for all its tokens are there, and one more page for each
        running sequence, so that the next decodes do not preempt it again."""
        head = self._waiting.head
        if head is None or len(self._running) >= self._limits.max_batch:
            return None
        hit = self._kv.admit(head, reserve=len(self._running))
        if hit is None:
            return None
        self._waiting.pop()
        insort(self._running, head, key=lambda seq: seq.rank)
        head.state = SequencePhase.RUNNING
        if head.preemptions == 0:
            head.cached_tokens = hit.n_tokens
        plan.admitted.append(head)
        return head
