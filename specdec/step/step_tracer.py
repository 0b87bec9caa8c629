"""Writes down what a step decided and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from specdec.control.outcome import DraftWork, Outcome
from specdec.control.step_record import StepRecord
from specdec.control.trace_log import TraceLog
from specdec.step.drafting import Proposals
from specdec.tree import TokenTree
from specdec.types import DrafterTrace, StepTrace


class StepTracer:
    """Turns a step's proposals and outcome into a `StepTrace`. ``began_s``: when the engine started."""

    def __init__(self, log: TraceLog, began_s: float) -> None:
        self._log, self._began_s = log, began_s

    def record(self, out: Proposals) -> StepRecord | None:
        """What a replay needs, taken before the controller learns from the step; None when nobody asked for it."""
        if not self._log.keeps_replay or not out.turns or out.choice is None:
            return None
        pending = [tree.tokens[0] for tree in out.trees if tree is not None]
        return StepRecord.of(
            out.turns, out.prefill_rows, out.free, out.decisions, out.work, out.choice.kept, pending, out.late
        )  # fmt: skip

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
        choice = out.choice
        self._log.add(
            StepTrace(
                step=self._log.count,
                at_s=round(began_s - self._began_s, 6),
                sequences=len(trees),
                rows=outcome.rows,
                prefill_rows=outcome.rows - sum(len(tree) for tree in trees),
                context=outcome.context,
                candidates=choice.candidates if choice else 0,
                budget=choice.budget if choice else 0,
                predicted_tokens=choice.predicted_tokens if choice else float(len(trees)),
                realised_tokens=sum(len(tokens) for tokens in outcome.tokens),
                predicted_draft_ms=out.predicted_draft_ms,
                realised_draft_ms=draft_ms,
                predicted_verify_ms=out.predicted_verify_ms,
                realised_verify_ms=outcome.verify_ms,
                plan_ms=plan_ms,
                commit_ms=commit_ms,
                control_ms=out.control_ms,
                drafters=[_drafter(name, done, out, trees, accepted) for name, done in out.work.items()],
                replay={} if record is None else record.end(outcome),
            )
        )


def _drafter(
    name: str, done: DraftWork, out: Proposals, trees: Seq[TokenTree], accepted: Seq[Seq[int]]
) -> DrafterTrace:
    decisions = out.decisions.get(name)
    decision = "free" if decisions is None else next((d for d in ("on", "forced", "probe") if d in decisions), "off")
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
