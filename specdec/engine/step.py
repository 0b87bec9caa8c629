"""One engine step, in four lines: plan, propose, verify, commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.manager import DrafterManager
from specdec.control.inputs import DraftWork, Outcome
from specdec.control.prefill_pace import PrefillPace, StepTimes
from specdec.control.trace import StepRecord, TraceLog
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Delta, DrafterTrace, StepTrace, StepTree
from specdec.engine.propose import Drafting, Proposals
from specdec.engine.scheduler import PlanEntry, Scheduler, StepPlan
from specdec.engine.verify import Acceptance, StepVerifier


@dataclass(slots=True)
class StepResult:
    """What one step did: who entered, what was emitted, and how long its parts took. Of ``rows``, ``draft_rows`` were
    draft tokens; ``sequences`` had any. accepted: per delta the nodes whose tokens were taken. context: tokens that a
    row looked back on, the mean over rows; prompt_context, plain_context: over rows of prompts, and over those that
    sample. began_s: by the step's clock."""

    began_s: float = 0.0
    admitted: list[Sequence] = field(default_factory=list)
    deltas: list[tuple[Sequence, Delta]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
    broken: list[Sequence] = field(default_factory=list)
    sequences: int = 0
    rows: int = 0
    draft_rows: int = 0
    context: float = 0.0
    prompt_context: float = 0.0
    plain_context: float = 0.0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts before their last token."""
        return self.rows - self.draft_rows - len(self.deltas)

    @property
    def times(self) -> StepTimes:
        """What prompts in later steps are sized by."""
        return StepTimes(
            len(self.deltas), self.rows, self.draft_rows, self.prompt_rows, self.context, self.prompt_context,
            self.plain_context, self.verify_ms, self.plan_ms + self.draft_ms + self.commit_ms,
        )  # fmt: skip


class Step:
    """Runs steps over the sequences a scheduler holds. ``tracer`` None: nothing is written down. ``pace``: is told how
    long steps took.

    Where the verifier overlaps, the controller gets a step's feedback while the next one is verified: what it decides
    then rests on all steps but the last. `flush` hands over what is still deferred.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KvCacheManager,
        drafters: DrafterManager,
        drafting: Drafting,
        verifier: StepVerifier,
        tracer: StepTracer | None = None,
        clock: Callable[[], float] = time.monotonic,
        pace: PrefillPace | None = None,
    ) -> None:
        self._scheduler, self._kv, self._drafters, self._drafting = scheduler, kv, drafters, drafting
        self._verifier, self._tracer, self._clock, self._pace = verifier, tracer, clock, pace
        self._lap_s = 0.0
        self._deferred: tuple[Proposals, StepResult] | None = None

    def run(self) -> StepResult:
        """One step. Returns an empty result when there is nothing to do."""
        began = self._lap_s = self._clock()
        plan = self._plan()
        plan_ms = self._lap_ms()
        proposals = self._propose(plan)
        draft_ms = self._lap_ms()
        accepted = self._verify(plan, proposals)
        verify_ms = self._lap_ms()
        result = StepResult(began, plan.admitted, plan_ms=plan_ms, draft_ms=draft_ms, verify_ms=verify_ms)
        self._commit(plan, proposals, accepted, result)
        result.commit_ms = self._lap_ms()
        if self._pace is not None and result.rows:
            self._pace.observe(result.times)
        self._defer_feedback(proposals, result)
        return result

    def flush(self) -> None:
        """Give the feedback of the last step, if that was deferred."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._give_feedback(*deferred)

    def _lap_ms(self) -> float:
        """Milliseconds since the last lap."""
        last, self._lap_s = self._lap_s, self._clock()
        return (self._lap_s - last) * 1e3

    def _plan(self) -> StepPlan:
        plan = self._scheduler.plan(self._drafting.want)
        for sequence in plan.preempted + plan.paused:
            self._drafters.rewind(sequence)
        for sequence in plan.admitted:
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = self._clock()
            if not sequence.was_set_aside:
                self._drafting.begin(sequence)
        return plan

    def _propose(self, plan: StepPlan) -> Proposals:
        proposals = self._drafting.propose(plan.entries)
        proposals.late = self._deferred is not None and self._deferred[0].step is not None
        return proposals

    def _verify(self, plan: StepPlan, proposals: Proposals) -> list[Acceptance]:
        if not plan.entries:
            return []
        try:
            wait = self._verifier.start(plan.entries, proposals.trees)
        finally:
            self.flush()
        return wait()

    def _commit(self, plan: StepPlan, proposals: Proposals, accepted: Seq[Acceptance], result: StepResult) -> None:
        # Before what they are counted from moves.
        result.context, result.prompt_context, result.plain_context = _mean_contexts(plan)
        result.prefilled += plan.prefilled
        result.sequences = len(plan.entries)
        for i, (entry, tree, acceptance) in enumerate(zip(plan.entries, proposals.trees, accepted, strict=True)):
            seq, start = entry.seq, entry.seq.n_computed
            result.rows += entry.prefill
            if tree is None:
                seq.n_computed += entry.prefill
                if seq.prefill_only and not seq.prefilling:
                    result.prefilled.append(seq)
            else:
                self._take(seq, tree, acceptance, result)
            self._tell_features(i, entry, acceptance, start)
            self._kv.publish(seq)
            if tree is not None and seq.drafts:
                self._drafters.observe(seq, result.deltas[-1][1].token_ids)

    def _take(self, seq: Sequence, tree: TokenTree, acceptance: Acceptance, result: StepResult) -> None:
        """Commit what came out of one tree."""
        delta = seq.take(acceptance.tokens, acceptance.logprobs)
        if acceptance.broken and seq.ending is None:
            result.broken.append(seq)  # as plain decode: the tokens before it stand, the next can't be had
        # The last token taken is pending; all before it have their KV, wherever acceptance would have led.
        seq.n_computed = len(seq.tokens) - 1
        nodes = acceptance.nodes[: len(delta.token_ids)]
        seq.count_step(tree, nodes, result.draft_ms, result.verify_ms)
        if seq.request.output.trees:
            delta.tree = _step_tree(tree, nodes, result)
        result.rows += len(tree)
        result.draft_rows += len(tree) - 1
        result.deltas.append((seq, delta))
        result.accepted.append(nodes)

    def _tell_features(self, index: int, entry: PlanEntry, acceptance: Acceptance, start: int) -> None:
        """Hand the target's hidden states of what was computed for good to a feature head, if there is one."""
        seq, verifier = entry.seq, self._verifier
        count = seq.n_computed - start
        if verifier.keeps_aux_states and count > 0 and seq.drafts:
            self._drafters.features(seq, start, verifier.features(index, entry.prefill, acceptance, count))

    def _defer_feedback(self, proposals: Proposals, result: StepResult) -> None:
        """Keep what is to be learned from the step; at once where nothing is gained by waiting."""
        if not result.deltas:
            return
        self._deferred = proposals, result
        if not self._verifier.overlaps:
            self.flush()

    def _give_feedback(self, proposals: Proposals, result: StepResult) -> None:
        """Tell the controller what came of its decisions, and write them down."""
        tokens = [delta.token_ids for _, delta in result.deltas]
        outcome = Outcome(tokens, result.rows, result.context, result.verify_ms, result.draft_ms)
        record = None
        if proposals.step is not None:
            record = self._tracer.record(proposals) if self._tracer else None
            self._drafting.learn(proposals, outcome)
        if self._tracer is not None:
            self._tracer.add(proposals, outcome, result, record)


def _mean_contexts(plan: StepPlan) -> tuple[float, float, float]:
    """Tokens a row looked back on, the mean over rows, over those of prompts alone, and over those that sample; a
    prompt's rows see half their own chunk. Drafts are left out: they see what their root does."""
    rows = prompt_rows = plain_rows = looked = prompts_looked = plain_looked = 0.0
    for entry in plan.entries:
        prefill, context = entry.prefill, entry.seq.n_computed + 0.5 * entry.prefill
        rows += prefill + 1
        looked += (prefill + 1) * context
        if prefill:
            prompt_rows += prefill
            prompts_looked += prefill * context
        if entry.samples:
            plain_rows += 1
            plain_looked += context
    return (
        looked / rows if rows else 0.0,
        prompts_looked / prompt_rows if prompt_rows else 0.0,
        plain_looked / plain_rows if plain_rows else 0.0,
    )


def _step_tree(tree: TokenTree, accepted: list[int], result: StepResult) -> StepTree:
    """``tree`` in plain values. accepted: nodes whose tokens were taken, from the root down."""
    return StepTree(
        tokens=list(tree.tokens),
        parents=list(tree.parents),
        chances=[round(math.exp(min(score, 0.0)), 4) for score in tree.scores],
        sources=[list(names) for names in tree.sources],
        accepted=list(accepted),
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
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

    def add(self, out: Proposals, outcome: Outcome, result: StepResult, record: StepRecord | None) -> None:
        """A step that sampled something."""
        trees = [tree for tree in out.trees if tree is not None]
        plan, drafted = out.plan, {} if out.step is None else out.step.drafted
        self._log.add(
            StepTrace(
                step=self._log.count,
                at_s=round(result.began_s - self._began_s, 6),
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
                predicted_verify_ms=plan.verify_ms if plan else 0.0,
                realised_verify_ms=outcome.verify_ms,
                plan_ms=result.plan_ms,
                commit_ms=result.commit_ms,
                control_ms=out.control_ms,
                drafters=[
                    _drafter_trace(name, done, trees, result.accepted) for name, done in drafted.items() if done.ran
                ],
                replay={} if record is None else record.end(outcome),
            )
        )


def _drafter_trace(name: str, done: DraftWork, trees: Seq[TokenTree], accepted: Seq[Seq[int]]) -> DrafterTrace:
    """What ``name`` did in the step. accepted: nodes accepted, per tree."""
    decision = next(decision for decision in ("on", "forced", "probe", "free", "read") if decision in done.decisions)
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
