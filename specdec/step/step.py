"""One engine step, in four lines: plan, propose, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.panel import DraftPanel
from draft.protocol import DraftTask
from specdec.config import SpeculationConfig
from specdec.kv_cache import KvCacheManager
from specdec.scheduler import PlanEntry, Scheduler, StepPlan
from specdec.sequence import Sequence
from specdec.step.sequence_state import SequenceState
from specdec.step.verifier import Verifier, Walk
from specdec.tree import TokenTree
from specdec.types import Delta


@dataclass(slots=True)
class StepResult:
    """What one step did: who entered, what was emitted (with its state), and how long its parts took."""

    admitted: list[Sequence] = field(default_factory=list)
    deltas: list[tuple[SequenceState, Delta]] = field(default_factory=list)
    prefilled: list[SequenceState] = field(default_factory=list)
    broken: list[SequenceState] = field(default_factory=list)
    rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0


class Step:
    """Runs steps over the sequences a scheduler holds.

    ``states`` maps each live sequence to its state; the engine owns it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvCacheManager,
        panel: DraftPanel,
        verifier: Verifier,
        speculation: SpeculationConfig,
        states: dict[Sequence, SequenceState],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self._kv, self._panel, self._verifier = scheduler, kv, panel, verifier
        self._speculation, self._states, self._clock = speculation, states, clock

    def run(self) -> StepResult:
        """One step. Returns an empty result when there is nothing to do."""
        began = self._clock()
        plan = self._plan()
        planned = self._clock()
        trees = self._propose(plan)
        proposed = self._clock()
        walks = self._verify(plan, trees)
        verified = self._clock()
        result = self._commit(plan, trees, walks, (proposed - planned) * 1e3, (verified - proposed) * 1e3)
        result.plan_ms = (planned - began) * 1e3
        result.commit_ms = (self._clock() - verified) * 1e3
        return result

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan(self._want)
        for sequence in plan.preempted:
            self._panel.rewind(sequence)
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = time.monotonic()
            if sequence.preemptions == 0:
                self._panel.begin(sequence, self._allowed(sequence))
        return plan

    def _propose(self, plan: StepPlan) -> list[TokenTree | None]:
        """One tree per entry; None while its prompt is still being prefilled."""
        trees: list[TokenTree | None] = []
        tasks = []
        for entry in plan.entries:
            trees.append(TokenTree(entry.seq.tokens[-1]) if entry.samples else None)
            if self._drafts(entry.seq):
                tasks.append((len(trees) - 1, self._task(entry)))
        if tasks:
            for (index, _), tree in zip(tasks, self._panel.propose([task for _, task in tasks]), strict=True):
                if trees[index] is not None:
                    trees[index] = tree
        return trees

    def _verify(self, plan: StepPlan, trees: Seq[TokenTree | None]) -> list[Walk]:
        if not plan.entries:
            return []
        return self._verifier.run(plan.entries, trees, [self._states[e.seq] for e in plan.entries])

    def _commit(
        self, plan: StepPlan, trees: Seq[TokenTree | None], walks: Seq[Walk], draft_ms: float, verify_ms: float
    ) -> StepResult:
        result = StepResult(admitted=plan.admitted, draft_ms=draft_ms, verify_ms=verify_ms)
        result.prefilled = [self._states[seq] for seq in plan.prefilled]
        for entry, tree, walk in zip(plan.entries, trees, walks, strict=True):
            seq, state = entry.seq, self._states[entry.seq]
            result.rows += entry.chain + (len(tree) if tree is not None else 0)
            if tree is None:
                seq.n_computed += entry.chain
                self._kv.publish(seq)
                if seq.prefill_only and not seq.prefilling:
                    result.prefilled.append(state)
                continue
            delta = state.take(walk.tokens, walk.logprobs)
            if walk.broken and state.ending is None:
                result.broken.append(state)  # as plain decode: the tokens before it stand, the next can't be had
            taken = len(delta.token_ids)
            # The last token taken is pending; all before it have their KV, wherever the walk would have led.
            seq.n_computed = len(seq.tokens) - 1
            state.record(tree, walk.nodes, taken, draft_ms, verify_ms)
            self._kv.publish(seq)
            self._panel.observe(seq, delta.token_ids)
            result.deltas.append((state, delta))
        return result

    def _want(self, seq: Sequence) -> int:
        """Draft nodes the fixed budget gives ``seq``: never more than it may still emit."""
        if not self._drafts(seq):
            return 0
        wish, ours = seq.request.speculation, self._speculation
        depth = ours.max_depth if wish.max_depth is None else wish.max_depth
        if depth == 0 or not self._panel.drafts_for(seq):
            return 0
        budget = ours.max_nodes if wish.max_nodes is None else wish.max_nodes
        return max(0, min(budget, self._states[seq].room - 1))

    def _drafts(self, seq: Sequence) -> bool:
        return self._speculation.enabled and self._states[seq].speculates

    def _allowed(self, seq: Sequence) -> tuple[str, ...] | None:
        return seq.request.speculation.drafters if self._drafts(seq) else ()

    def _task(self, entry: PlanEntry) -> DraftTask:
        wish, ours = entry.seq.request.speculation, self._speculation
        return DraftTask(
            entry.seq,
            self._states[entry.seq].sampling,
            entry.nodes if entry.samples else 0,
            ours.max_depth if wish.max_depth is None else wish.max_depth,
            ours.width if wish.width is None else wish.width,
        )
