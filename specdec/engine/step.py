"""One engine step: plan, propose, verify, commit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from operator import mul

from draft.manager import DrafterManager
from specdec.control.inputs import DraftWork, Outcome
from specdec.control.prefill_pace import PrefillPace, StepTimes
from specdec.control.trace import TraceLog, step_record
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Delta, DrafterTrace, StepTrace, StepTree
from specdec.engine.propose import Drafting, Proposals
from specdec.engine.scheduler import PlanEntry, Scheduler, StepPlan
from specdec.engine.verify import Acceptance, StepVerifier
from specdec.errors import StageError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResult:
    """The outcome of one step."""

    began_s: float
    """By the step's clock."""
    admitted: list[Sequence] = field(default_factory=list)
    deltas: list[tuple[Sequence, Delta]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    """Per delta, the nodes whose tokens were committed."""
    prefilled: list[Sequence] = field(default_factory=list)
    """Prefill-only sequences that are complete."""
    broken: list[Sequence] = field(default_factory=list)
    """Sequences that had no usable logit, or no finite embedding."""
    faults: list[tuple[Sequence, StageError]] = field(default_factory=list)
    """Sequences in whose stages an exception was raised; at most one fault per sequence."""
    sequences: int = 0
    """Sequences that had rows."""
    times: StepTimes = field(default_factory=StepTimes)
    """Rows and times, by which later prefill chunks are sized."""
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
    timed: bool = True
    """Whether `verify_ms` is the time of this forward alone."""

    def fail(self, sequence: Sequence, error: Exception, stage: str) -> None:
        """Record an exception of one sequence's stage."""
        if not self.is_faulty(sequence):
            self.faults.append((sequence, StageError.of(error, stage)))

    def is_faulty(self, sequence: Sequence) -> bool:
        """Whether a fault of the sequence is recorded."""
        return any(sequence is faulty for faulty, _ in self.faults)


class Step:
    """Runs steps over a scheduler's sequences.

    An exception that belongs to one sequence becomes a fault of the result. A fault of the drafting stage as a whole
    costs speed, and one of the trace costs an entry. All other exceptions are raised: the step is broken.

    If the verifier overlaps, the controller and the prefill pace learn from a step while the next one is verified, so
    their decisions rest on all steps but the last. `flush` passes on deferred feedback.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvCacheManager,
        drafters: DrafterManager,
        drafting: Drafting,
        verifier: StepVerifier,
        trace: TraceLog,
        clock: Callable[[], float],
        pace: PrefillPace,
    ) -> None:
        self._scheduler, self._kv, self._drafters, self._drafting = scheduler, kv, drafters, drafting
        self._verifier, self._trace, self._clock, self._pace = verifier, trace, clock, pace
        self._lap_s = 0.0
        self._timed: StepTimes | None = None  # the step that the prefill pace has yet to observe
        self._deferred: tuple[Proposals, StepResult] | None = None  # the step that the controller has yet to observe
        self._learn_ms = 0.0  # of learning from the last step, unless a forward ran meanwhile
        self._queued = False  # whether the device may still compute the last step's forward

    def run(self) -> StepResult:
        """Run one step. The result is empty if there is nothing to do."""
        began = self._lap_s = self._clock()
        result = StepResult(began)
        plan = self._plan(result)
        result.plan_ms = self._lap_ms()
        proposals = self._propose(plan, result)
        result.draft_ms = self._lap_ms()
        accepted = self._verify(plan, proposals, result)
        result.verify_ms = self._lap_ms()
        self._commit(plan, proposals, accepted, result)
        result.commit_ms = self._lap_ms()
        result.times.forward_ms = result.verify_ms if result.timed else 0.0
        result.times.other_ms = result.plan_ms + result.draft_ms + result.commit_ms
        self._defer_feedback(proposals, result)
        return result

    def flush(self) -> None:
        """Pass on the feedback of the last step if it was deferred."""
        timed, self._timed = self._timed, None
        if timed is not None:
            self._pace.observe(timed)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._give_feedback(*deferred)

    def _lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        last, self._lap_s = self._lap_s, self._clock()
        return (self._lap_s - last) * 1e3

    def _plan(self, result: StepResult) -> StepPlan:
        def guarded(call: Callable[[Sequence], int | None], sequence: Sequence) -> int:
            try:
                return call(sequence) or 0
            except Exception as error:
                result.fail(sequence, error, "drafting")
                return 0

        plan = self._scheduler.plan(partial(guarded, self._drafting.want))
        result.admitted = plan.admitted
        for sequence in plan.preempted + plan.paused:
            guarded(self._drafters.rewind, sequence)
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = self._clock()
            if not sequence.was_set_aside:
                guarded(self._drafters.begin, sequence)
        return plan

    def _propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        proposals = self._drafting.propose(plan.entries)
        proposals.late = self._deferred is not None and self._deferred[0].step is not None
        for sequence, error in proposals.faults:
            result.fail(sequence, error, "drafting")
        return proposals

    def _verify(self, plan: StepPlan, proposals: Proposals, result: StepResult) -> list[Acceptance]:
        if not plan.entries:
            return []
        try:
            wait = self._verifier.start(plan.entries, proposals.trees)
        finally:
            self.flush()
        _count_rows(plan, proposals, result)
        # A device's step without a tree returns before its forward ends; the next step's wait covers both forwards.
        queued = self._verifier.overlaps and all(tree is None for tree in proposals.trees)
        result.timed, self._queued = not (queued or self._queued), queued
        return wait()

    def _commit(self, plan: StepPlan, proposals: Proposals, accepted: Seq[Acceptance], result: StepResult) -> None:
        result.prefilled += plan.prefilled
        for i, (entry, tree, acceptance) in enumerate(zip(plan.entries, proposals.trees, accepted, strict=True)):
            try:
                if acceptance.fault is not None:
                    raise acceptance.fault
                if not (result.faults and result.is_faulty(entry.seq)):
                    self._commit_entry(i, entry, tree, acceptance, result)
            except Exception as error:
                result.fail(entry.seq, error, "commit")

    def _commit_entry(
        self, index: int, entry: PlanEntry, tree: TokenTree | None, acceptance: Acceptance, result: StepResult
    ) -> None:
        seq, start = entry.seq, entry.seq.n_computed
        if tree is None:
            seq.n_computed += entry.prefill
            if seq.pooler is not None and (wanted := seq.pooler.wanted(start, seq.n_computed)):
                seq.pool(self._verifier.final_states(index, wanted))
            if seq.prefill_only and not seq.prefilling:
                whole = seq.pooler is None or seq.pooler.is_finite
                (result.prefilled if whole else result.broken).append(seq)
        else:
            self._take(seq, tree, acceptance, result)
        self._pass_features(index, entry, acceptance, start)
        try:
            self._kv.publish(seq)
        except Exception as error:
            raise StageError.of(error, "publishing") from error
        if tree is not None and seq.drafts:
            self._drafters.observe(seq, result.deltas[-1][1].token_ids)

    def _take(self, seq: Sequence, tree: TokenTree, acceptance: Acceptance, result: StepResult) -> None:
        """Commit the tokens of one tree."""
        delta = seq.take(acceptance.tokens, acceptance.logprobs)
        if acceptance.broken and seq.ending is None:
            result.broken.append(seq)  # the tokens before it are kept, as in plain decode
        # The last committed token is pending; all before it have their KV.
        seq.n_computed = len(seq.tokens) - 1
        nodes = acceptance.nodes[: len(delta.token_ids)]
        seq.count_step(tree, nodes, result.draft_ms, result.verify_ms)
        if seq.request.output.trees:
            delta.tree = _step_tree(tree, nodes, result)
        result.deltas.append((seq, delta))
        result.accepted.append(nodes)

    def _pass_features(self, index: int, entry: PlanEntry, acceptance: Acceptance, start: int) -> None:
        """Pass the target's hidden states of the committed rows to a feature head, if there is one."""
        seq, verifier = entry.seq, self._verifier
        count = seq.n_computed - start
        if verifier.keeps_aux_states and count > 0 and seq.drafts:
            self._drafters.features(seq, start, verifier.features(index, entry.prefill, acceptance, count))

    def _defer_feedback(self, proposals: Proposals, result: StepResult) -> None:
        """Keep the step's feedback until the next forward runs, or pass it on at once if the verifier does not overlap.

        A step with faults gives the controller none, since its outcome does not cover all of its trees.
        """
        if result.times.rows:
            self._timed = result.times
        if result.deltas and not result.faults:
            self._deferred = proposals, result
        if not self._verifier.overlaps:
            self.flush()

    def _give_feedback(self, proposals: Proposals, result: StepResult) -> None:
        """Let the controller learn from a step, and trace it. A fault loses only that."""
        tokens = [delta.token_ids for _, delta in result.deltas]
        draft_ms = result.draft_ms - proposals.match_ms + self._learn_ms
        times = result.times
        outcome = Outcome(tokens, times.rows, times.context, times.forward_ms, draft_ms)
        try:
            if proposals.step is not None:
                took_ms = self._drafting.learn(proposals, outcome)
                self._learn_ms = 0.0 if self._verifier.overlaps else took_ms
            if self._trace.enabled:
                self._trace.add(step_trace(self._trace, proposals, outcome, result))
        except Exception:
            logger.exception("the controller or the trace failed; a step is missing from them")


def _count_rows(plan: StepPlan, proposals: Proposals, result: StepResult) -> None:
    """Set the counts of sequences and rows, and the mean contexts, before the commit advances the sequences."""
    result.sequences = len(plan.entries)
    times, nodes = result.times, [len(tree) for tree in proposals.trees if tree is not None]
    times.decodes, times.draft_rows = len(nodes), sum(nodes) - len(nodes)
    prefills = [entry.prefill for entry in plan.entries]
    times.rows = sum(prefills) + sum(nodes)
    # Prompt rows attend to half of their own chunk on average. Draft rows are left out; they attend to what their root
    # does.
    contexts = [entry.seq.n_computed + 0.5 * entry.prefill for entry in plan.entries]
    times.context = _mean(contexts, [prefill + 1 for prefill in prefills])
    times.prompt_context = _mean(contexts, prefills)
    times.plain_context = _mean(contexts, [entry.samples for entry in plan.entries])


def _mean(contexts: Seq[float], rows: Seq[int]) -> float:
    """The mean of ``contexts``, each counted as often as ``rows`` say; 0 without rows."""
    total = sum(rows)
    return sum(map(mul, contexts, rows)) / total if total else 0.0


def _step_tree(tree: TokenTree, accepted: list[int], result: StepResult) -> StepTree:
    """``tree`` as plain values. accepted: nodes whose tokens were committed, from the root down."""
    return StepTree(
        tokens=list(tree.tokens),
        parents=list(tree.parents),
        chances=[round(math.exp(min(score, 0.0)), 4) for score in tree.scores],
        sources=[list(names) for names in tree.sources],
        accepted=list(accepted),
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
    )


def step_trace(log: TraceLog, out: Proposals, outcome: Outcome, result: StepResult) -> StepTrace:
    """The next entry of ``log``: a step that sampled tokens."""
    trees = [tree for tree in out.trees if tree is not None]
    plan, step = out.plan, out.step
    eligible = [] if step is None else [(name, done) for name, done in step.drafted.items() if any(done.decisions)]
    replay = {}
    if log.keeps_replay and step is not None and plan is not None:
        replay = step_record(step, plan, outcome, out.late)
    return StepTrace(
        step=log.count,
        at_s=round(result.began_s - log.began_s, 6),
        sequences=len(trees),
        rows=outcome.rows,
        prefill_rows=outcome.rows - sum(len(tree) for tree in trees),
        context=outcome.context,
        candidates=plan.candidates if plan else 0,
        budget=plan.budget if plan else 0,
        predicted_tokens=plan.predicted_tokens if plan else float(len(trees)),
        realised_tokens=sum(len(tokens) for tokens in outcome.tokens),
        predicted_draft_ms=out.predicted_draft_ms,
        realised_draft_ms=result.draft_ms,
        predicted_verify_ms=plan.verify_ms if plan else math.nan,
        realised_verify_ms=outcome.verify_ms,
        plan_ms=result.plan_ms,
        commit_ms=result.commit_ms,
        control_ms=out.control_ms,
        drafters=[_drafter_trace(name, done, trees, result.accepted) for name, done in eligible],
        replay=replay,
    )


def _drafter_trace(name: str, done: DraftWork, trees: Seq[TokenTree], accepted: Seq[Seq[int]]) -> DrafterTrace:
    """The part of drafter ``name``. accepted: accepted nodes per tree."""
    decision = next(one for one in ("on", "forced", "probe", "free", "read", "off") if one in done.decisions)
    trace = DrafterTrace(name, decision, ms=done.ms, read=done.prefilled)
    for proposed, pending, tree, nodes in zip(done.trees, done.pending, trees, accepted, strict=True):
        if proposed is not None:
            trace.read += pending
            trace.sequences += 1
            trace.proposed += len(proposed) - 1
        for node in range(1, len(tree)):
            if name in tree.sources[node]:
                trace.verified += 1
                trace.predicted += math.exp(tree.scores[node])
        trace.accepted += sum(name in tree.sources[node] for node in nodes)
    return trace
