"""Propose: which drafters are asked, what they propose merged into one tree each, and which nodes are verified."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draft.manager import DrafterManager
from draft.protocol import DraftTask
from specdec.control.controller import Controller
from specdec.control.inputs import DraftRequest, DraftWork, Outcome, Plan, SequenceInputs, StepInputs
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SpeculationMode
from specdec.engine.scheduler import PlanEntry

PROBE_DEPTH = 3  # a probe asks whether drafting pays again, not how far


@dataclass(slots=True)
class Proposals:
    """What one step drafts. trees: one per plan entry, None while its prompt is prefilled. step, plan: what the
    controller was told and decided, None where nothing was to be drafted. ``late``: it had not learned from the step
    before when it decided this one."""

    trees: list[TokenTree | None]
    step: StepInputs | None = None
    plan: Plan | None = None
    control_ms: float = 0.0
    predicted_draft_ms: float = 0.0
    late: bool = False


class Drafting:
    """The propose stage. With nothing to draft for, it hands out trees of one node and touches nothing else."""

    def __init__(
        self,
        panel: DrafterManager,
        controller: Controller,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._panel, self.controller, self._clock = panel, controller, clock

    def begin(self, sequence: Sequence) -> None:
        """A sequence runs for the first time."""
        if sequence.drafts:
            sequence.history = self.controller.enter(sequence.request.sampling.temperature)
        self._panel.begin(sequence, sequence.request.speculation.drafters if sequence.drafts else ())

    def want(self, sequence: Sequence) -> int:
        """The most draft nodes ``sequence`` may have verified: never more than it may still emit."""
        if not sequence.drafts or not self._panel.may_draft(sequence, sequence.request.speculation.drafters):
            return 0
        return max(0, min(sequence.max_nodes, sequence.room - 1)) if sequence.max_depth else 0

    def propose(self, entries: Seq[PlanEntry]) -> Proposals:
        """One tree per entry."""
        out = Proposals([TokenTree(entry.seq.tokens[-1]) if entry.samples else None for entry in entries])
        self._keep_up(entries)
        at = [i for i, entry in enumerate(entries) if entry.samples]
        if not any(entries[i].nodes for i in at):
            return out
        sampling = [entries[i] for i in at]
        step = out.step = self._inputs(sampling, sum(entry.prefill for entry in entries), out)
        plan = self._decide(step, out)
        while plan.asks:
            for ask in plan.asks:
                step.drafted[ask.drafter] = self._ask(ask, sampling, step, out)
            plan = self._decide(step, out)
        out.plan = plan
        for i, tree, kept in zip(at, plan.trees, plan.kept, strict=True):
            out.trees[i] = tree.subtree(kept)
        return out

    def learn(self, out: Proposals, outcome: Outcome) -> None:
        """The step is over, and the next one maybe decided already."""
        if out.step is not None and out.plan is not None:
            began = self._clock()
            self.controller.observe(out.step, out.plan, outcome)
            out.control_ms += (self._clock() - began) * 1e3

    def _decide(self, step: StepInputs, out: Proposals) -> Plan:
        began = self._clock()
        plan = self.controller.decide(step)
        out.control_ms += (self._clock() - began) * 1e3
        return plan

    def _inputs(self, sampling: Seq[PlanEntry], prefill_rows: int, out: Proposals) -> StepInputs:
        """What the controller is told of the step."""
        began = self._clock()
        prices = self.controller.prices([entry.seq.n_computed + entry.prefill for entry in sampling], prefill_rows)
        out.control_ms += (self._clock() - began) * 1e3
        return StepInputs(prices, [self._sequence_inputs(entry, prices.plain_ms) for entry in sampling], prefill_rows)

    def _sequence_inputs(self, entry: PlanEntry, step_ms: float) -> SequenceInputs:
        seq, panel = entry.seq, self._panel
        if seq.history is None:  # mode OFF: it takes part in the batch, not in drafting
            seq.history = self.controller.enter(seq.request.sampling.temperature)
        backlog = {
            name: panel.backlog(name, seq)
            for name, model_based in panel.model_based.items()
            if model_based and panel.trusts(name, seq)
        }
        drafters = [name for name in panel.names if panel.trusts(name, seq)]  # none that failed to tell its backlog
        return SequenceInputs(
            seq.history,
            seq.tokens[-1],
            entry.nodes,
            seq.room,
            drafters,
            seq.request.speculation.mode is SpeculationMode.ON,
            tokens_due(seq, step_ms),
            entry.prefill > 0,
            backlog,
        )

    def _ask(self, ask: DraftRequest, sampling: Seq[PlanEntry], step: StepInputs, out: Proposals) -> DraftWork:
        """Let one drafter propose for those it is worth asking for."""
        if not (ask.asked or ask.reads):
            return DraftWork([None] * len(sampling), decisions=ask.decisions)
        tasks = [
            self._task(ask, entry, one, decision) if decision in ask.floors else None
            for entry, one, decision in zip(sampling, step.sequences, ask.decisions, strict=True)
        ]
        backlog = sum(one.backlog.get(ask.drafter, 0) for one, task in zip(step.sequences, tasks, strict=True) if task)
        for i, reads in ask.reads.items():
            tasks[i] = DraftTask(sampling[i].seq, 0, 0, 1, ask.drafter, reads=reads)
        reads = sum(ask.reads.values())
        done = self._panel.ask(ask.drafter, tasks, backlog + reads)
        done.decisions, done.reads = ask.decisions, reads
        out.predicted_draft_ms += self.controller.draft_ms(ask.drafter, ask.asked, done.levels)
        done.trees = [
            None if tree is None or i in ask.reads else self._lawful(entry.seq, tree)
            for i, (entry, tree) in enumerate(zip(sampling, done.trees, strict=True))
        ]
        return done

    def _task(self, ask: DraftRequest, entry: PlanEntry, one: SequenceInputs, decision: str) -> DraftTask:
        seq, odds = entry.seq, self.controller.odds(ask.drafter, one)
        if one.forced:
            return DraftTask(seq, entry.nodes, seq.max_depth, seq.width, ask.drafter, odds)
        depth = min(seq.max_depth, PROBE_DEPTH) if decision == "probe" else seq.max_depth
        floor = ask.floors[decision]
        return DraftTask(seq, entry.nodes, depth, seq.width, ask.drafter, odds, floor, ask.deepening)

    def _keep_up(self, entries: Seq[PlanEntry]) -> None:
        """Lookup drafters read prompts while these are prefilled."""
        waiting = [e for e in entries if not e.samples and e.seq.drafts]
        if not waiting:
            return
        for name, model_based in self._panel.model_based.items():
            if not model_based:
                tasks = [
                    DraftTask(entry.seq, 0, 0, 1, name) if self._panel.trusts(name, entry.seq) else None
                    for entry in waiting
                ]
                self._panel.ask(name, tasks)

    def _lawful(self, seq: Sequence, tree: TokenTree) -> TokenTree:
        """``tree`` without nodes that the request's grammar forbids: drafters of texts know nothing of it."""
        grammar = seq.sampling.grammar
        if grammar is None or len(tree) == 1:
            return tree
        lawful = {0}
        for node in range(1, len(tree)):
            if tree.parents[node] in lawful:
                token = tree.tokens[node]
                mask = grammar.mask(tree.path_tokens(tree.parents[node]))
                if mask[token >> 5] >> (token & 31) & 1:
                    lawful.add(node)
        if len(lawful) == len(tree):
            return tree
        return tree.subtree(sorted(lawful - {0}, key=lambda n: -tree.scores[n]))


def tokens_due(sequence: Sequence, step_ms: float) -> float:
    """Tokens the coming step should yield so that ``sequence`` keeps its target time per token, or ends before its
    deadline; 0 where it has no such objective. ``step_ms``: what a step takes.
    """
    target = sequence.request.target_tpot_ms
    if target is None and sequence.deadline is None:
        return 0.0
    due, now = 0.0, time.monotonic()
    if target is not None and sequence.first_token_s is not None:
        elapsed_ms = (now - sequence.first_token_s) * 1e3
        due = (elapsed_ms + step_ms) / target - (sequence.n_output - sequence.n_resumed - 1)
    if sequence.deadline is not None and sequence.request.stopping.max_tokens is not None:
        left_ms = max((sequence.deadline - now) * 1e3, step_ms)
        due = max(due, sequence.room * step_ms / left_ms)
    return max(0.0, due)
