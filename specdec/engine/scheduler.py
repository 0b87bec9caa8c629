"""Continuous batching: which sequences run in the next step, with how many prompt rows and draft nodes each."""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from heapq import nsmallest

from specdec.control.prefill_pace import DecodeLoad, PrefillPace
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import Sequence, SequencePhase
from specdec.errors import ConfigError, QueueFullError
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the batch and the queue. A full batch fits into a step with one row each."""

    max_batch: int
    """Sequences that run together."""
    max_step_rows: int
    """Rows of a step."""
    prefill_chunk: int
    """Prompt tokens of a step, pending ones not counted."""
    max_context: int
    """Tokens of a sequence."""
    max_queued: int
    """Requests that wait; 0: none, unless a place in the batch is free."""
    target_tpot_ms: float = 80.0
    """Time between tokens of requests that ask for none."""


@dataclass(slots=True)
class PlanEntry:
    """One sequence's rows of a step. Row i is written to slot ``n_computed + i``; its pages are allocated."""

    seq: Sequence
    prefill: int
    """Prompt rows: ``seq.tokens[n_computed : n_computed + prefill]``."""
    nodes: int
    """Maximum draft nodes below the pending token."""
    samples: bool
    """Whether row ``prefill`` is the pending token, the root of the sequence's tree."""


@dataclass(slots=True)
class StepPlan:
    """The next step, and the changes of the batch that led to it. No sequence is in two of the lists but `entries`."""

    entries: list[PlanEntry] = field(default_factory=list)
    """Decoding sequences, then prefilling ones, each by importance."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their pages and wait again."""
    paused: list[Sequence] = field(default_factory=list)
    """Prefilling sequences that lost their place in the batch and wait again."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that left the queue."""
    prefilled: list[Sequence] = field(default_factory=list)
    """Prefill-only sequences that are complete without any row."""


PROMPT_SHARE = 0.75
"""Share of a step's rows that drafts leave to prompts if these need them. Most nodes that drafts reserve are never
verified, and a prompt that takes two steps instead of one pays for another forward."""
SHORT_SHARE = 2 / 3
"""Share of a chunk for the shortest prompts; the rest goes to the most important one."""
PATIENCE_S = 10.0
"""Seconds after arrival until a sequence is due: from then on no less important one may take pages that it lacks."""
DUE_SHARE = 0.25
"""Share of the time to its deadline after which a sequence is due, if that is sooner; the rest is for its answer."""
RETRY_S = 1.0
"""Shortest retry delay of a client that a full queue refuses; the server lengthens it by its forecast."""
PAUSE_RATIO = 4
"""A prompt is paused for another one only if what it still has to compute is this many times as long."""
PAGES_SHARE = 8
"""A prompt waits for common pages of at least the longest step's rows divided by this, and for at least one page. Fewer
pages take less time than the further step: on an H200, with steps of 1,024 rows, that is the time of 170 rows."""


@dataclass(slots=True)
class PromptRoom:
    """The rows of a step that are left for prompts."""

    rows: int
    """Rows of any kind."""
    chunk: int
    """Prompt rows among them, pending tokens not counted."""
    entries: dict[Sequence, PlanEntry] = field(default_factory=dict)
    """Entries made so far."""

    def give(self, seq: Sequence, most: int) -> PlanEntry | None:
        """Give ``seq`` up to ``most`` more prompt rows, and its pending token if they complete the prompt; None: no row
        is left."""
        entry = self.entries.get(seq) or PlanEntry(seq, 0, 0, False)
        remaining = len(seq.tokens) - seq.n_pending - seq.n_computed - entry.prefill
        more = min(remaining, most, self.chunk, self.rows)
        samples = more == remaining and more < self.rows and not (seq.prefill_only or entry.samples)
        if not more and not samples:
            return None
        entry.prefill += more
        entry.samples = samples
        self.chunk -= more
        self.rows -= more + samples
        self.entries[seq] = entry
        return entry

    @property
    def incomplete_rows(self) -> int:
        """Rows given to prompts that this step does not complete."""
        return sum(entry.prefill for entry in self.entries.values() if not entry.samples)


class Scheduler:
    """Decides which sequences run. Importance is priority (high first), then the deadline or `PATIENCE_S` after
    arrival, whichever is sooner.

    Running and waiting prompts share each chunk: `SHORT_SHARE` goes to the shortest prompts, the rest to the most
    important one, both within a priority. So a long prompt does not delay short ones, and short ones do not starve it.

    Guarantees:

    - a running, decoding sequence gets a row in every step, or is preempted for want of pages;
    - nothing is preempted for drafts, for a prompt or for a less important sequence;
    - no less important sequence takes pages that a due one lacks. A sequence is due if it has begun to answer, or has
      waited for `PATIENCE_S` or for `DUE_SHARE` of the time to its deadline;
    - a prompt may lose its place in a full batch to a much shorter one, except the most important prompt;
    - common pages of prompts that begin alike are computed once: a prompt waits while a running one, which is more
      important and has no more left to compute, computes enough (`PAGES_SHARE`) of the pages that it lacks.

    pace: sizes the chunks.

    Raises:
        ConfigError: one sequence of ``max_context`` tokens would not fit into the KV cache.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        limits: SchedulerLimits,
        pace: PrefillPace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limits.max_context > kv.n_total * PAGE_SIZE:
            raise ConfigError(
                f"max_context: {limits.max_context} tokens do not fit a KV cache of {kv.n_total * PAGE_SIZE}; "
                "raise kv_tokens or lower max_context"
            )
        self._kv, self._limits, self._clock, self._pace = kv, limits, clock, pace
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []  # by importance, so that a preempted one returns to its old place
        self._reading: dict[bytes, list[Sequence]] = {}
        """While planning: prefilling sequences by the key of their first page."""
        self._pages_to_await = max(1, limits.max_step_rows // (PAGES_SHARE * PAGE_SIZE))
        self._serial = itertools.count()
        self._to_preempt: list[Sequence] = []

    @property
    def running(self) -> Seq[Sequence]:
        """Sequences in the batch, most important first. A view: do not keep it across a plan."""
        return self._running

    @property
    def n_waiting_requests(self) -> int:
        """Waiting requests that have no running sample."""
        if not self._waiting:
            return 0
        active = {id(seq.request) for seq in self._running}
        return len({id(seq.request) for seq in self._waiting} - active)

    @property
    def is_full(self) -> bool:
        """Whether `add` would refuse a request."""
        place_free = len(self._running) < self._limits.max_batch
        return self.n_waiting_requests >= max(self._limits.max_queued, 1 if place_free else 0)

    def add(self, seqs: Seq[Sequence]) -> None:
        """Queue the samples of one request, all or none.

        Raises:
            QueueFullError: ``max_queued`` requests wait.
        """
        if self.is_full:
            raise QueueFullError(self._limits.max_queued, RETRY_S)
        for seq in seqs:
            rank_s = seq.due_s = seq.arrival_s + PATIENCE_S
            if seq.deadline is not None:
                rank_s = min(rank_s, seq.deadline)
                seq.due_s = min(seq.due_s, seq.arrival_s + DUE_SHARE * (seq.deadline - seq.arrival_s))
            seq.rank = (-seq.request.priority, rank_s, next(self._serial))
            self._enqueue(seq)

    def finish(self, seq: Sequence) -> None:
        """Remove ``seq`` from batch or queue and release its pages. Idempotent."""
        if seq.phase is SequencePhase.RUNNING:
            self._running.remove(seq)
        elif seq in self._waiting:
            self._waiting.remove(seq)
        seq.phase = SequencePhase.FINISHED
        self._kv.release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Preempt ``seq`` at the next plan, as if pages had run out; no-op unless it runs then."""
        self._to_preempt.append(seq)

    def plan(self, want: Callable[[Sequence], int]) -> StepPlan:
        """Plan the next step. want: returns the maximum draft nodes for a sequence that samples."""
        plan = StepPlan()
        for seq in self._to_preempt:
            if seq.phase is SequencePhase.RUNNING:
                plan.preempted.append(self._preempt(seq))
        self._to_preempt.clear()
        prefilling = self._plan_decodes(plan)
        decodes = len(plan.entries)
        prompts = bool(prefilling or self._waiting)
        chunk = self._chunk(plan.entries, prefilling) if prompts else 0
        rows = self._limits.max_step_rows - decodes
        reserved = self._rows_for_prompts(prefilling, min(chunk, rows)) if prompts else 0
        rows -= self._share_nodes(plan.entries, want, rows - reserved)
        if prompts and rows > 0:
            rows = self._plan_prefills(plan, prefilling, PromptRoom(rows, chunk))
        if rows > 0 and len(plan.entries) > decodes:
            self._share_nodes([entry for entry in plan.entries[decodes:] if entry.samples], want, rows)
        self._take_pages_for_nodes(plan.entries)  # last: what waits has the first claim on them
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Give each decoding sequence a row; returns the prefilling ones."""
        prefilling: list[Sequence] = []
        ensure = self._kv.ensure
        for seq in self._running.copy():
            if seq.phase is not SequencePhase.RUNNING:
                continue  # preempted in this loop
            if seq.prefilling:
                prefilling.append(seq)
            elif seq.prefill_only:
                plan.prefilled.append(seq)
            elif ensure(seq, len(seq.tokens)) or self._make_room(seq, plan):
                plan.entries.append(PlanEntry(seq, 0, 0, True))
        return prefilling

    def _make_room(self, seq: Sequence, plan: StepPlan) -> bool:
        """Free a page for ``seq``: take back pages for drafts, then preempt from the least important sequence up.

        False if that is ``seq`` itself. Sequences that are planned are more important, so they are never preempted.
        """
        self._return_pages_for_nodes()
        while not self._kv.ensure(seq, len(seq.tokens)):
            victim = self._running[-1]
            plan.preempted.append(self._preempt(victim))
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> Sequence:
        """Return it to the queue because pages are short."""
        seq.preemptions += 1
        return self._set_aside(seq)

    def _set_aside(self, seq: Sequence) -> Sequence:
        """Return it to the queue. Its computed pages stay in the prefix cache until they are evicted."""
        self._running.remove(seq)
        self._kv.release(seq)
        seq.n_computed = seq.draft_computed = 0
        seq.phase = SequencePhase.WAITING
        self._enqueue(seq)
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        seq.queued_prefill = self._kv.uncached(seq)
        insort(self._waiting, seq, key=_by_rank)

    def _chunk(self, entries: list[PlanEntry], prefilling: list[Sequence]) -> int:
        """Prompt rows of a step in which ``entries`` sample."""
        limits, load = self._limits, DecodeLoad()
        for entry in entries:
            seq = entry.seq
            target_ms = seq.request.target_tpot_ms or limits.target_tpot_ms
            load.add(entry.prefill + 1, seq.n_computed + 0.5 * entry.prefill, target_ms, seq.n_output)
        prompts = len(prefilling) + len(self._waiting)
        context = max((seq.n_computed for seq in prefilling), default=0)
        return self._pace.rows(load, prompts, context, limits.prefill_chunk)

    def _rows_for_prompts(self, prefilling: list[Sequence], chunk: int) -> int:
        """Rows that drafts must leave to prompts."""
        cap = min(chunk, int(self._limits.max_step_rows * PROMPT_SHARE))
        if self._waiting and len(self._running) < self._limits.max_batch:
            return cap
        return min(cap, sum(len(seq.tokens) - seq.n_computed for seq in prefilling))

    def _share_nodes(self, entries: list[PlanEntry], want: Callable[[Sequence], int], budget: int) -> int:
        """Share ``budget`` rows as draft nodes, as far as the context allows; returns the rows used."""
        if budget <= 0 or not entries:
            return 0
        most = self._limits.max_context - 1
        wishes = [max(0, min(want(e.seq), most - e.seq.n_computed - e.prefill)) for e in entries]
        for entry, nodes in zip(entries, fair_shares(wishes, budget), strict=True):
            entry.nodes = nodes
        return sum([entry.nodes for entry in entries])

    def _take_pages_for_nodes(self, entries: list[PlanEntry]) -> None:
        """Give the nodes of each entry slots, fewer where pages are short."""
        for entry in entries:
            seq, base = entry.seq, entry.seq.n_computed + entry.prefill + 1
            if entry.nodes and not self._kv.ensure(seq, base + entry.nodes):
                self._kv.ensure(seq, (len(seq.pages) + self._kv.n_free) * PAGE_SIZE)
                entry.nodes = max(0, min(entry.nodes, len(seq.pages) * PAGE_SIZE - base))

    def _return_pages_for_nodes(self) -> None:
        """Free the pages that running sequences hold for draft nodes."""
        for seq in self._running:
            self._kv.trim(seq, len(seq.tokens))

    def _plan_prefills(self, plan: StepPlan, prefilling: list[Sequence], room: PromptRoom) -> int:
        """Share the chunk among prompts (see the class); returns the rows left."""
        decoding, whole = plan.entries.copy(), room.chunk
        count = self._limits.max_batch
        self._reading.clear()
        for seq in prefilling:
            self._note_reading(seq)
        startable = not plan.preempted and (prefilling or len(self._running) < count)
        queue = [seq for seq in self._waiting if not self._awaits_pages(seq)] if startable else []
        if queue and not self._kv.fits(queue[0], reserve=len(self._running)):
            self._return_pages_for_nodes()
        shortest = sorted(prefilling + nsmallest(count, queue, key=self._by_turns), key=self._by_turns)
        foremost = sorted([*prefilling, *queue[:count]], key=_by_rank)
        due = [seq for seq in self._waiting if self._is_due(seq)]
        for prompts, left in ((shortest, whole - int(SHORT_SHARE * whole)), (foremost, 0)):
            for seq in prompts:
                if seq in plan.paused or seq in plan.prefilled:
                    continue
                if room.chunk <= left or room.rows <= 0:
                    break
                if seq.phase is SequencePhase.WAITING and not self._admit(seq, plan, room, due):
                    continue
                if seq.prefill_only and not seq.prefilling:
                    plan.prefilled.append(seq)
                    continue
                entry = room.give(seq, room.chunk - left)
                if entry is not None and entry.samples:  # its first token waits for the step, so the chunk shrinks
                    decoding.append(entry)
                    others = [other for other in prefilling if other is not seq]
                    room.chunk = min(room.chunk, self._chunk(decoding, others) - room.incomplete_rows)
        plan.entries += sorted(room.entries.values(), key=lambda entry: entry.seq.rank)
        return room.rows

    def _admit(self, seq: Sequence, plan: StepPlan, room: PromptRoom, due: list[Sequence]) -> bool:
        """Start a sequence if it can get a place and pages for all its tokens.

        One more page per running sequence must stay free, so that the next steps do not preempt it again. due: the due
        sequences when the plan began.
        """
        if self._awaits_pages(seq) or self._must_not_pass(seq, due):
            return False
        victim = None
        if len(self._running) >= self._limits.max_batch:
            victim = self._to_pause(seq, room)
            if victim is None:
                return False
        hit = self._kv.admit(seq, reserve=len(self._running))
        if hit is None:
            return False
        if victim is not None:
            victim.pauses += 1
            plan.paused.append(self._set_aside(victim))
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_rank)
        seq.phase = SequencePhase.RUNNING
        if not seq.was_set_aside:
            seq.cached_tokens = min(hit.n_tokens, seq.n_prompt)
        plan.admitted.append(seq)
        self._note_reading(seq)
        return True

    def _must_not_pass(self, seq: Sequence, due: list[Sequence]) -> bool:
        """Whether a waiting sequence comes before ``seq``: one of a higher priority, which needs only a free place
        while it awaits pages, or the first of ``due``, if it is more important and lacks pages."""
        above = 0  # sequences of a higher priority that await pages
        for other in self._waiting:
            if other.request.priority <= seq.request.priority:
                break
            if not self._awaits_pages(other):
                return True
            above += 1
        if above and len(self._running) + above >= self._limits.max_batch:
            return True
        first = next((other for other in due if other.phase is SequencePhase.WAITING), seq)
        return first.rank < seq.rank and not self._kv.fits(first, reserve=len(self._running))

    def _note_reading(self, seq: Sequence) -> None:
        for key in seq.page_keys[:1]:
            self._reading.setdefault(key, []).append(seq)

    def _awaits_pages(self, seq: Sequence) -> bool:
        """Whether a waiting sequence waits for pages of a running prompt (see the class)."""
        return any(
            other.rank < seq.rank
            and _pending_prefill(other) <= seq.queued_prefill
            and self._kv.will_share(other, seq, self._pages_to_await)
            for key in seq.page_keys[:1]
            for other in self._reading.get(key, ())
        )

    def _is_due(self, seq: Sequence) -> bool:
        """Whether a waiting sequence is due (see the class)."""
        return seq.n_output > 0 or self._clock() >= seq.due_s

    def _by_turns(self, seq: Sequence) -> tuple[int, int, float, int]:
        """Sort key of prompts: waiting ones that are due, then the fewest remaining chunks, then importance."""
        priority, rank_s, serial = seq.rank
        if seq.phase is SequencePhase.WAITING and self._is_due(seq):
            return priority, -1, rank_s, serial
        return priority, int(_pending_prefill(seq) / (SHORT_SHARE * self._limits.prefill_chunk)), rank_s, serial

    def _to_pause(self, seq: Sequence, room: PromptRoom) -> Sequence | None:
        """The prompt to pause for ``seq``: the longest of a lower priority, else the longest that is much longer.

        Never the most important one of the same priority. None without a prefix cache: its computed rows would be lost.
        """
        if not self._kv.prefix_cache:
            return None
        priority = seq.request.priority
        prefilling = [other for other in self._running if other.prefilling and other not in room.entries]
        less = [other for other in prefilling if other.request.priority < priority]
        if not less:
            equal = [other for other in prefilling if other.request.priority == priority]
            least = PAUSE_RATIO * (seq.queued_prefill + PAGE_SIZE)
            less = [other for other in equal[1:] if _pending_prefill(other) >= least]
        return max(less, key=lambda other: (-other.request.priority, _pending_prefill(other)), default=None)


def _pending_prefill(seq: Sequence) -> int:
    """Prompt tokens still to be computed; for a waiting sequence, as of when it entered the queue."""
    return seq.queued_prefill if seq.phase is SequencePhase.WAITING else len(seq.tokens) - 1 - seq.n_computed


def _by_rank(seq: Sequence) -> tuple[int, float, int]:
    return seq.rank


def fair_shares(wishes: list[int], budget: int) -> list[int]:
    """Share ``budget`` one by one in turns until all wishes are met or it is used up."""
    if sum(wishes) <= budget:
        return wishes
    shares = [0] * len(wishes)
    hungry = [i for i, wish in enumerate(wishes) if wish > 0]
    while budget > 0 and hungry:
        each = max(1, budget // len(hungry))
        for i in hungry:
            more = min(each, wishes[i] - shares[i], budget)
            shares[i] += more
            budget -= more
        hungry = [i for i in hungry if shares[i] < wishes[i]]
    return shares
