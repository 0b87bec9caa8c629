"""Continuous batching: who runs in the next step, how many prompt rows and draft nodes each gets, and who waits."""

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
from specdec.errors import ConfigError, PromptTooLongError, QueueFullError
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``max_batch`` sequences run together; a step has at most ``max_step_rows`` rows, of which ``prefill_chunk``
    are prompt tokens before a pending one; a sequence uses at most ``max_context`` slots; at most ``max_queued``
    requests wait. ``target_tpot_ms``: the time between tokens of requests that ask for none.

    Raises:
        ValueError: a limit is out of range, or a full batch would not fit one row each into a step.
    """

    max_batch: int
    max_step_rows: int
    prefill_chunk: int
    max_context: int
    max_queued: int
    target_tpot_ms: float = 80.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_rows", "prefill_chunk", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}")
        if self.max_queued < 0:
            raise ValueError(f"max_queued: must not be negative, got {self.max_queued}")
        if self.max_batch > self.max_step_rows:
            raise ValueError(f"max_batch: {self.max_batch} sequences need more than {self.max_step_rows} rows a step")


@dataclass(slots=True)
class PlanEntry:
    """A sequence's part of a step: the prefill chunk ``seq.tokens[n_computed : n_computed + prefill]``; then, if it
    ``samples``, the pending token as row ``prefill``, the root of a tree of at most ``nodes`` draft nodes.

    Row i is written to slot ``n_computed + i``; pages for all ``rows`` are on the sequence.
    """

    seq: Sequence
    prefill: int
    nodes: int
    samples: bool

    @property
    def rows(self) -> int:
        """Rows this entry may take in the forward pass."""
        return self.prefill + 1 + self.nodes if self.samples else self.prefill


@dataclass(slots=True)
class StepPlan:
    """``entries``: decoding sequences, then prefilling ones, each by importance.

    ``preempted`` lost their pages and wait again, ``paused`` their place in the batch, in the middle of a prompt;
    ``admitted`` left the queue (no sequence is in two of them).
    ``prefilled``: prefill-only sequences that are complete without any row: finish them.
    """

    entries: list[PlanEntry] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)


PROMPT_SHARE = 0.75  # of a step's rows that drafts leave to prompts where these need them: most nodes that drafts
# reserve are never verified, and a prompt that is read in two steps instead of one pays for another pass
SHORT_SHARE = 2 / 3  # of a chunk, for the shortest prompts
PATIENCE_S = 10.0  # from arrival: how long a request may be overtaken for want of pages
DUE_SHARE = 0.25  # of the time to its deadline, if that is shorter: the rest it needs to be answered
WORTH_A_PAUSE = 4  # times as long as a prompt is the rest of the one that makes place for it


@dataclass(slots=True)
class PromptRoom:
    """What prompts may still take of a step: ``rows``, ``chunk`` of them before a pending one. ``entries``: who did."""

    rows: int
    chunk: int
    entries: dict[Sequence, PlanEntry] = field(default_factory=dict)

    def give(self, seq: Sequence, most: int) -> PlanEntry | None:
        """Up to ``most`` prompt rows more for ``seq``, and the pending one if these are its last; None: there are none
        to be had. What it had in this step counts as computed."""
        entry = self.entries.get(seq) or PlanEntry(seq, 0, 0, False)
        remaining = len(seq.tokens) - 1 - seq.n_computed - entry.prefill
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
    def going_on(self) -> int:
        """Rows given to prompts that do not end in this step."""
        return sum(entry.prefill for entry in self.entries.values() if not entry.samples)


class Scheduler:
    """Decides who runs. Importance is priority (high first), then the deadline or `PATIENCE_S` from arrival,
    whichever is first.

    Prompts that are read and those that wait take turns by one rule: two thirds of a chunk go to the shortest, the rest
    to the most important, both within a priority. So a short one is not held up by a long one, and the one that is due
    first has a third of every chunk, however many short ones come.

    What never happens: a running, decoding sequence without its row; a preemption for drafts, for a prompt or for a
    less important sequence; a request that lacks pages, when it is due, overtaken by a less important one. Due is who
    has begun to answer, or waited for `PATIENCE_S` or for `DUE_SHARE` of the time to its deadline. A prompt
    may lose its place in a full batch to a much shorter one, but not the most important of those being read.

    ``pace`` None: a chunk is as long as it may be, whoever decodes.

    Raises:
        ConfigError: ``max_context`` exceeds what the KV cache holds, so that one sequence could exhaust it alone.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
        pace: PrefillPace | None = None,
    ) -> None:
        if limits.max_context > kv.n_total * PAGE_SIZE:
            raise ConfigError(
                f"max_context: {limits.max_context} tokens do not fit a KV cache of {kv.n_total * PAGE_SIZE}; "
                "raise kv_tokens or lower max_context"
            )
        self._kv, self._limits, self._clock, self._pace = kv, limits, clock, pace
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
            rank_s = seq.due_s = seq.arrival_s + PATIENCE_S
            if seq.deadline is not None:
                rank_s = min(rank_s, seq.deadline)
                seq.due_s = min(seq.due_s, seq.arrival_s + DUE_SHARE * (seq.deadline - seq.arrival_s))
            seq.rank = (-seq.request.priority, rank_s, next(self._serial))
        self._enqueue(leader)
        shares_pages = self._kv.prefix_cache and len(leader.tokens) > PAGE_SIZE
        if siblings and shares_pages:
            self._waiting.hold(leader, siblings)
        else:
            for seq in siblings:
                self._enqueue(seq)

    def finish(self, seq: Sequence) -> None:
        """Take ``seq`` out wherever it is and release its pages, at once. Idempotent."""
        if seq.phase is SequencePhase.RUNNING:
            self._running.remove(seq)
            self._retry.completed(self._clock())
        elif seq.phase is SequencePhase.WAITING:
            self._waiting.remove(seq)
        seq.phase = SequencePhase.FINISHED
        self._kv.release(seq)

    def preempt(self, seq: Sequence) -> None:
        """Let ``seq`` give up its pages at the next plan, as if they had run out; no-op unless it runs then."""
        self._to_preempt.append(seq)

    def plan(self, want: Callable[[Sequence], int]) -> StepPlan:
        """Decide the next step. ``want(seq)``: draft nodes the budget would like for a sequence that samples."""
        for seq in self._waiting.siblings_free_to_go():
            self._enqueue(seq)
        plan = StepPlan()
        for seq in self._to_preempt:
            if seq.phase is SequencePhase.RUNNING:
                plan.preempted.append(self._preempt(seq))
        self._to_preempt.clear()
        prefilling = self._plan_decodes(plan)
        decodes = len(plan.entries)
        prompts = bool(prefilling) or self._waiting.head is not None
        chunk = self._chunk(plan.entries, prefilling) if prompts else 0
        rows = self._limits.max_step_rows - decodes
        rows -= self._grant_nodes(plan.entries, want, rows - self._rows_for_prompts(prefilling, min(chunk, rows)))
        if prompts and rows > 0:
            rows = self._plan_prefills(plan, prefilling, PromptRoom(rows, chunk))
        if rows > 0 and len(plan.entries) > decodes:
            self._grant_nodes([entry for entry in plan.entries[decodes:] if entry.samples], want, rows)
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """One row for each decoding sequence; returns those that still prefill."""
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
        """Find a page for ``seq``: take back room for drafts, then preempt from the least important up.

        False when that is ``seq`` itself. Sequences planned already are more important, so never a victim.
        """
        for other in self._running:
            self._kv.trim(other, len(other.tokens))
        while not self._kv.ensure(seq, len(seq.tokens)):
            victim = self._running[-1]
            plan.preempted.append(self._preempt(victim))
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> Sequence:
        """Take its pages, for want of them."""
        seq.preemptions += 1
        return self._set_aside(seq)

    def _pause(self, seq: Sequence) -> Sequence:
        """Take its place in the batch, which a shorter or more important prompt gets."""
        seq.pauses += 1
        return self._set_aside(seq)

    def _set_aside(self, seq: Sequence) -> Sequence:
        """What was computed stays in the prefix cache until somebody else needs its pages."""
        self._running.remove(seq)
        self._kv.release(seq)
        seq.n_computed = seq.draft_computed = 0
        seq.phase = SequencePhase.WAITING
        self._enqueue(seq)
        return seq

    def _enqueue(self, seq: Sequence) -> None:
        seq.unread = self._kv.uncached(seq)
        self._waiting.push(seq)

    def _chunk(self, entries: list[PlanEntry], prefilling: list[Sequence]) -> int:
        """Prompt rows of a step in which ``entries`` sample."""
        limits = self._limits
        if self._pace is None or not entries:
            return limits.prefill_chunk
        load = DecodeLoad()
        for entry in entries:
            seq = entry.seq
            target_ms = seq.request.target_tpot_ms or limits.target_tpot_ms
            load.add(entry.prefill + 1, seq.n_computed + 0.5 * entry.prefill, target_ms, seq.n_output)
        prompts = len(prefilling) + len(self._waiting)
        context = max((seq.n_computed for seq in prefilling), default=0)
        return self._pace.rows(load, prompts, context, limits.prefill_chunk)

    def _rows_for_prompts(self, prefilling: list[Sequence], chunk: int) -> int:
        """Rows that drafts must leave."""
        cap = min(chunk, int(self._limits.max_step_rows * PROMPT_SHARE))
        if self._waiting.head is not None and len(self._running) < self._limits.max_batch:
            return cap
        return min(cap, sum(len(seq.tokens) - seq.n_computed for seq in prefilling))

    def _grant_nodes(self, entries: list[PlanEntry], want: Callable[[Sequence], int], budget: int) -> int:
        """Divide ``budget`` rows fairly as draft nodes, as far as context and available pages go; returns rows used."""
        if budget <= 0 or not entries:
            return 0
        most = self._limits.max_context - 1
        wishes = [max(0, min(want(e.seq), most - e.seq.n_computed - e.prefill)) for e in entries]
        used = 0
        for entry, nodes in zip(entries, fair_shares(wishes, budget), strict=True):
            seq, base = entry.seq, entry.seq.n_computed + entry.prefill + 1
            if nodes and not self._kv.ensure(seq, base + nodes):
                self._kv.ensure(seq, (len(seq.pages) + self._kv.n_free) * PAGE_SIZE)
                nodes = max(0, min(nodes, len(seq.pages) * PAGE_SIZE - base))
            entry.nodes = nodes
            used += nodes
        return used

    def _plan_prefills(self, plan: StepPlan, prefilling: list[Sequence], room: PromptRoom) -> int:
        """`SHORT_SHARE` of the chunk to the shortest prompts, the rest to the most important; returns the rows left."""
        decoding, whole = plan.entries.copy(), room.chunk
        count = self._limits.max_batch
        startable = not plan.preempted and (prefilling or len(self._running) < count)
        queue = self._waiting.queue if startable else ()
        shortest = sorted(prefilling + nsmallest(count, queue, key=self._by_turns), key=self._by_turns)
        foremost = sorted([*prefilling, *queue[:count]], key=_by_rank)
        due = [seq for seq in queue if self._is_due(seq)]
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
                if entry is not None and entry.samples:  # it waits for the step to end, as those that decode
                    decoding.append(entry)
                    going_on = [other for other in prefilling if other is not seq]
                    room.chunk = min(room.chunk, self._chunk(decoding, going_on) - room.going_on)
        plan.entries += sorted(room.entries.values(), key=lambda entry: entry.seq.rank)
        return room.rows

    def _admit(self, seq: Sequence, plan: StepPlan, room: PromptRoom, due: list[Sequence]) -> bool:
        """Start a sequence if there is a place or one can be made, and pages for all its tokens, and one more page for
        each running sequence, so that the next decodes do not preempt it again. due: who was, when the plan began."""
        if self._must_not_pass(seq, due):
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
            plan.paused.append(self._pause(victim))
        self._waiting.remove(seq)
        insort(self._running, seq, key=_by_rank)
        seq.phase = SequencePhase.RUNNING
        if not seq.was_set_aside:
            seq.cached_tokens = min(hit.n_tokens, seq.n_prompt)
        plan.admitted.append(seq)
        return True

    def _must_not_pass(self, seq: Sequence, due: list[Sequence]) -> bool:
        """Whether one of a higher priority waits, or the first of those ``due`` that still wait is before ``seq`` in
        line and short of pages."""
        head = self._waiting.head
        if head is not None and head.request.priority > seq.request.priority:
            return True
        first = next((other for other in due if other.phase is SequencePhase.WAITING), seq)
        return first.rank < seq.rank and not self._kv.fits(first, reserve=len(self._running))

    def _is_due(self, seq: Sequence) -> bool:
        """Whether one that waits had begun to answer, or has waited long enough."""
        return seq.n_output > 0 or self._clock() >= seq.due_s

    def _by_turns(self, seq: Sequence) -> tuple[int, int, float, int]:
        """The fewest turns to go first, equals by importance; before them who waits and is due."""
        priority, rank_s, serial = seq.rank
        if seq.phase is SequencePhase.WAITING and self._is_due(seq):
            return priority, -1, rank_s, serial
        return priority, int(_unread(seq) / (SHORT_SHARE * self._limits.prefill_chunk)), rank_s, serial

    def _to_pause(self, seq: Sequence, room: PromptRoom) -> Sequence | None:
        """The prompt whose place ``seq`` may have: one of a lower priority, or a much longer one; of these the longest.
        Not the first in line of the same priority, and only where what was computed of it is not lost."""
        if not self._kv.prefix_cache:
            return None
        priority = seq.request.priority
        reading = [other for other in self._running if other.prefilling and other not in room.entries]
        less = [other for other in reading if other.request.priority < priority]
        if not less:
            equal = [other for other in reading if other.request.priority == priority]
            less = [other for other in equal[1:] if _unread(other) >= WORTH_A_PAUSE * (seq.unread + PAGE_SIZE)]
        return max(less, key=lambda other: (-other.request.priority, _unread(other)), default=None)


def _unread(seq: Sequence) -> int:
    """Prompt tokens that are still to be computed; of one that waits, as many as when it began to."""
    return seq.unread if seq.phase is SequencePhase.WAITING else len(seq.tokens) - 1 - seq.n_computed


def _by_rank(seq: Sequence) -> tuple[int, float, int]:
    return seq.rank


def fair_shares(wishes: list[int], budget: int) -> list[int]:
    """What each gets when one node at a time is dealt round, first come first, until wishes or budget end."""
    if sum(wishes) <= budget:
        return wishes
    shares = [0] * len(wishes)
    hungry = [i for i, wish in enumerate(wishes) if wish > 0]
    while budget > 0 and hungry:
        if budget < len(hungry):
            for i in hungry[:budget]:
                shares[i] += 1
            break
        each = budget // len(hungry)
        for i in hungry:
            more = min(each, wishes[i] - shares[i])
            shares[i] += more
            budget -= more
        hungry = [i for i in hungry if shares[i] < wishes[i]]
    return shares


MIN_RETRY_S = 0.1
UNKNOWN_RETRY_S = 1.0
WEIGHT = 0.2  # of the newest interval in the running mean


class RetryEstimate:
    """Running mean of the time between completions while there is work; idle time does not count."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._mark_s = 0.0

    def start(self, now: float) -> None:
        """Work arrives at an idle scheduler (monotonic seconds)."""
        self._mark_s = now

    def completed(self, now: float) -> None:
        """A running sequence ended."""
        interval = max(0.0, now - self._mark_s)
        self._mark_s = now
        self._mean_s = interval if self._mean_s is None else self._mean_s + WEIGHT * (interval - self._mean_s)

    def retry_after_s(self) -> float:
        """Seconds a refused client should wait: one mean interval, at least 0.1."""
        return max(MIN_RETRY_S, UNKNOWN_RETRY_S if self._mean_s is None else self._mean_s)


class WaitingQueue:
    """Ordered by ``rank``: priority, then the deadline or `PATIENCE_S` from arrival, whichever is first. A preempted
    sequence so returns to its old place."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self._held: dict[Sequence, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._held.values()))

    @property
    def head(self) -> Sequence | None:
        """The most important sequence that may be admitted."""
        return self._queue[0] if self._queue else None

    @property
    def queue(self) -> Seq[Sequence]:
        """Those that may be admitted, most important first."""
        return self._queue

    def sequences(self) -> list[Sequence]:
        """All that wait: the queue in order, then those held back."""
        return self._queue + [seq for siblings in self._held.values() for seq in siblings]

    def push(self, seq: Sequence) -> None:
        """Enter the queue."""
        insort(self._queue, seq, key=_by_rank)

    def hold(self, leader: Sequence, siblings: Seq[Sequence]) -> None:
        """Keep ``siblings`` back until ``leader`` has its whole prompt in the cache."""
        self._held[leader] = list(siblings)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence wherever it waits; no-op when it does not."""
        if seq in self._queue:
            self._queue.remove(seq)
            return
        for siblings in self._held.values():
            if seq in siblings:
                siblings.remove(seq)
                return

    def siblings_free_to_go(self) -> list[Sequence]:
        """Take out the siblings whose leader is past its prompt; where it ended before that, the next one leads."""
        free: list[Sequence] = []
        for leader in list(self._held):
            past_prompt = leader.phase is not SequencePhase.WAITING and leader.n_computed >= leader.n_prompt - 1
            if not past_prompt and leader.phase is not SequencePhase.FINISHED:
                continue
            siblings = self._held.pop(leader)
            if not past_prompt and len(siblings) > 1:
                self.hold(siblings[0], siblings[1:])
                siblings = siblings[:1]
            free += siblings
        return free
