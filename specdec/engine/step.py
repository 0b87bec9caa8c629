"""One engine step, in four lines: plan, propose, verify, commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.panel import DraftPanel
from specdec.control.inputs import DraftWork, Outcome
from specdec.control.trace import StepRecord, TraceLog
from specdec.engine.propose import Drafting, Proposals
from specdec.engine.scheduler import PlanEntry, Scheduler, StepPlan
from specdec.engine.sequence_state import SequenceState
from specdec.engine.verify import StepVerifier, Walk
from specdec.kv_cache import KvCacheManager
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from specdec.types import Delta, DrafterTrace, StepTrace, StepTree


def shown_tree(tree: TokenTree, accepted: list[int], draft_ms: float, verify_ms: float) -> StepTree:
    """``tree`` in plain values. accepted: nodes whose tokens were taken, from the root down."""
    return StepTree(
        tokens=list(tree.tokens),
        parents=list(tree.parents),
        chances=[round(math.exp(min(score, 0.0)), 4) for score in tree.scores],
        sources=[list(names) for names in tree.sources],
        accepted=list(accepted),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
    )


class StepTracer:
    """Turns a step's proposals and outcome into a `StepTrace`. ``began_s``: when the engine started."""

    def __init__(self, log: TraceLog, began_s: float) -> None:
        self._log, self._began_s = log, began_s

    def record(self, out: Proposals) -> StepRecord | None:
        """What a replay needs, taken before the controller learns from the step; None when nobody asked for it."""
        if not self._log.keeps_replay or out.step is None or out.plan is None:
            return None
        return StepRecord.of(out.step, out.plan, out.late)

    def add(
        self,
        out: Proposals,
        outcome: Outcome,
        accepted: Seq[Seq[int]],
        record: StepRecord | None,
        times: tuple[float, float, float, float],
    ) -> None:
        """A step that sampled something. accepted: nodes accepted, per tree that is not None, in order of entries.
        times: seconds when it began, and milliseconds of plan, draft and commit."""
        began_s, plan_ms, draft_ms, commit_ms = times
        trees = [tree for tree in out.trees if tree is not None]
        plan, drafted = out.plan, {} if out.step is None else out.step.drafted
        self._log.add(
            StepTrace(
                step=self._log.count,
                at_s=round(began_s - self._began_s, 6),
                sequences=len(trees),
                rows=outcome.rows,
                prefill_rows=outcome.rows - sum(len(tree) for tree in trees),
                context=outcome.context,
                candidates=plan.candidates if plan else 0,
                budget=plan.budget if plan else 0,
                predicted_tokens=plan.predicted_tokens if plan else float(len(trees)),
                realised_tokens=sum(len(tokens) for tokens in outcome.tokens),
                predicted_draft_ms=out.predicted_draft_ms,
                realised_draft_ms=draft_ms,
                predicted_verify_ms=plan.verify_ms if plan else 0.0,
                realised_verify_ms=outcome.verify_ms,
                plan_ms=plan_ms,
                commit_ms=commit_ms,
                control_ms=out.control_ms,
                drafters=[_drafter(name, done, trees, accepted) for name, done in drafted.items() if done.asked],
                replay={} if record is None else record.end(outcome),
            )
        )


def _drafter(name: str, done: DraftWork, trees: Seq[TokenTree], accepted: Seq[Seq[int]]) -> DrafterTrace:
    decision = next(decision for decision in ("on", "forced", "probe", "free") if decision in done.decisions)
    trace = DrafterTrace(name, decision, ms=done.ms)
    for proposed, tree, nodes in zip(done.trees, trees, accepted, strict=True):
        if proposed is not None:
            trace.sequences += 1
            trace.proposed += len(proposed) - 1
        for node in range(1, len(tree)):
            if name in tree.sources[node]:
                trace.verified += 1
                trace.predicted += math.exp(tree.scores[node])
        trace.accepted += sum(name in tree.sources[node] for node in nodes)
    return trace


@dataclass(slots=True)
class StepResult:
    """What one step did: who entered, what was emitted (with its state), and how long its parts took. ``draft_rows``
    of the ``rows`` were draft tokens."""

    admitted: list[Sequence] = field(default_factory=list)
    deltas: list[tuple[SequenceState, Delta]] = field(default_factory=list)
    prefilled: list[SequenceState] = field(default_factory=list)
    broken: list[SequenceState] = field(default_factory=list)
    rows: int = 0
    draft_rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What a step did, for those who learn from it; ``accepted`` and ``times`` as `StepTracer.add` takes them."""

    proposals: Proposals
    outcome: Outcome
    accepted: list[list[int]]
    times: tuple[float, float, float, float]


class Step:
    """Runs steps over the sequences a scheduler holds.

    ``states`` maps each live sequence to its state; the engine owns it. ``tracer`` None: nothing is written down.

    Where the verifier overlaps, a step is learned from while the next one is verified: what the controller decides
    then rests on all steps but the last. `settle` does what is still owed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvCacheManager,
        panel: DraftPanel,
        drafting: Drafting,
        verifier: StepVerifier,
        states: dict[Sequence, SequenceState],
        tracer: StepTracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self._kv, self._panel, self._drafting = scheduler, kv, panel, drafting
        self._verifier, self._states, self._tracer, self._clock = verifier, states, tracer, clock
        self._owed: _Lesson | None = None

    def run(self) -> StepResult:
        """One step. Returns an empty result when there is nothing to do."""
        began = self._clock()
        plan = self._plan()
        planned = self._clock()
        proposals = self._drafting.propose(plan.entries)
        proposals.late = self._owed is not None and self._owed.proposals.step is not None
        proposed = self._clock()
        walks = self._verify(plan, proposals)
        verified = self._clock()
        context = _mean_context(plan)  # before the commit moves what it is counted from
        result = self._commit(plan, proposals, walks, (proposed - planned) * 1e3, (verified - proposed) * 1e3)
        result.plan_ms = (planned - began) * 1e3
        result.commit_ms = (self._clock() - verified) * 1e3
        self._owe(plan, proposals, walks, result, context, began)
        return result

    def settle(self) -> None:
        """Learn from the last step, if that was put off."""
        owed, self._owed = self._owed, None
        if owed is not None:
            self._learn(owed)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan(self._drafting.want)
        for sequence in plan.preempted:
            self._panel.rewind(sequence)
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = time.monotonic()
            if sequence.preemptions == 0:
                self._drafting.begin(sequence)
        return plan

    def _verify(self, plan: StepPlan, proposals: Proposals) -> list[Walk]:
        if not plan.entries:
            return []
        try:
            walks = self._verifier.start(plan.entries, proposals.trees, [self._states[e.seq] for e in plan.entries])
        finally:
            self.settle()
        return walks()

    def _commit(
        self, plan: StepPlan, proposals: Proposals, walks: Seq[Walk], draft_ms: float, verify_ms: float
    ) -> StepResult:
        result = StepResult(admitted=plan.admitted, draft_ms=draft_ms, verify_ms=verify_ms)
        result.prefilled = [self._states[seq] for seq in plan.prefilled]
        for i, (entry, tree, walk) in enumerate(zip(plan.entries, proposals.trees, walks, strict=True)):
            seq, state, start = entry.seq, self._states[entry.seq], entry.seq.n_computed
            result.rows += entry.chain + (len(tree) if tree is not None else 0)
            if tree is None:
                seq.n_computed += entry.chain
                self._tell_features(i, entry, walk, start)
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
            if seq.request.output.trees:
                delta.tree = shown_tree(tree, walk.nodes[:taken], draft_ms, verify_ms)
            result.draft_rows += len(tree) - 1
            self._tell_features(i, entry, walk, start)
            self._kv.publish(seq)
            self._panel.observe(seq, delta.token_ids)
            result.deltas.append((state, delta))
        return result

    def _tell_features(self, index: int, entry: PlanEntry, walk: Walk, start: int) -> None:
        """Hand the target's hidden states of what was computed for good to a feature head, if there is one."""
        count = entry.seq.n_computed - start
        if self._verifier.keeps_aux_states and count > 0 and self._states[entry.seq].speculates:
            self._panel.features(entry.seq, start, self._verifier.features(index, entry.chain, walk, count))

    def _owe(
        self, plan: StepPlan, proposals: Proposals, walks: Seq[Walk], result: StepResult, context: float, began: float
    ) -> None:
        """Note what is to be learned from the step; at once where nothing is gained by waiting."""
        if not result.deltas:
            return
        tokens = [delta.token_ids for _, delta in result.deltas]
        outcome = Outcome(tokens, result.rows, context, result.verify_ms, result.draft_ms)
        nodes = [walk.nodes[: len(taken)] for walk, taken in zip(_sampled(plan, walks), tokens, strict=True)]
        times = (began, result.plan_ms, result.draft_ms, result.commit_ms)
        self._owed = _Lesson(proposals, outcome, nodes, times)
        if not self._verifier.overlaps:
            self.settle()

    def _learn(self, lesson: _Lesson) -> None:
        """Tell the controller what came of its decisions, and write them down."""
        proposals, outcome, record = lesson.proposals, lesson.outcome, None
        if proposals.step is not None:
            record = self._tracer.record(proposals) if self._tracer else None
            self._drafting.learn(proposals, outcome)
        if self._tracer is not None:
            self._tracer.add(proposals, outcome, lesson.accepted, record, lesson.times)


def _sampled(plan: StepPlan, walks: Seq[Walk]) -> list[Walk]:
    return [walk for entry, walk in zip(plan.entries, walks, strict=True) if entry.samples]


def _mean_context(plan: StepPlan) -> float:
    """Tokens a row looked back on, the mean over rows; a prompt's rows see half their own chunk."""
    rows = looked = 0.0
    for entry in plan.entries:
        n = entry.chain + 1
        rows += n
        looked += n * (entry.seq.n_computed + 0.5 * entry.chain)
    return looked / rows if rows else 0.0
