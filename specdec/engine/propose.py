"""Propose: run the drafters that the controller requests, and keep the nodes that it selects for verification."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.manager import DrafterManager
from draft.protocol import DraftTask
from specdec.control.controller import Controller
from specdec.control.inputs import (
    DraftDecision,
    DraftRequest,
    DraftWork,
    Match,
    Outcome,
    Plan,
    SequenceInputs,
    StepInputs,
)
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SpeculationMode
from specdec.engine.scheduler import PlanEntry
from specdec.errors import StageError

logger = logging.getLogger(__name__)

PROBE_DEPTH = 3  # tree levels of a probe, which tests whether drafting pays, not how deep
GRAMMAR_BUDGET_S = 0.01
"""Time of a step for tests of draft nodes against grammars, shared equally. Nodes that are not tested are dropped."""
PAUSE_STEPS = 64  # steps without drafts after a fault of the stage, so that a persistent one costs little


@dataclass(slots=True)
class Proposals:
    """The drafts of one step."""

    trees: list[TokenTree | None]
    """Per plan entry; None while its prompt is prefilled."""
    step: StepInputs | None = None
    """The controller's inputs; None if nothing could be drafted."""
    plan: Plan | None = None
    """The controller's decision."""
    control_ms: float = 0.0
    """Time of the controller."""
    match_ms: float = 0.0
    """Time in which lookup drafters read new text and looked for matches. No decision avoids it, so it is no price of
    one."""
    predicted_draft_ms: float = 0.0
    """`match_ms` and the expected time of the proposals."""
    late: bool = False
    """The decision was made before the controller learned from the previous step."""
    grammar_s: dict[Sequence, float] = field(default_factory=dict)
    """Seconds spent so far on testing each sequence's nodes against its grammar."""
    faults: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Exceptions that belong to one sequence."""


class Drafting:
    """The propose stage. With nothing to draft it returns trees of one node and does no other work.

    An exception in a sequence's grammar is a fault of that sequence. After any other exception of this stage,
    `PAUSE_STEPS` steps decode plainly.
    """

    def __init__(
        self, manager: DrafterManager, controller: Controller, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._manager, self.controller, self._clock = manager, controller, clock
        self._rest = self._rested = 0  # steps that need no decision, and those since the last one
        self._resting: list[Sequence] = []  # the sequences for which that holds
        self._rest_matched = False  # whether lookup drafters had a match when the rest began
        self._paused = 0  # steps left without drafts after a fault

    def want(self, sequence: Sequence) -> int:
        """Maximum draft nodes of ``sequence`` in a step: at most what it may still emit."""
        if not sequence.drafts or not self._manager.may_draft(sequence):
            return 0
        return max(0, min(sequence.max_nodes, sequence.room - 1)) if sequence.max_depth else 0

    def propose(self, entries: Seq[PlanEntry]) -> Proposals:
        """Draft for all plan entries."""
        out = _plain(entries)
        if self._paused:
            self._paused -= 1
            return out
        try:
            self._draft(entries, out)
        except Exception:
            logger.exception("drafting failed; the next %d steps decode without drafts", PAUSE_STEPS)
            self._paused = PAUSE_STEPS
            return _plain(entries)
        return out

    def _draft(self, entries: Seq[PlanEntry], out: Proposals) -> None:
        """Replace the trees of ``out`` by drafts."""
        if not any(entry.seq.drafts for entry in entries):
            return
        rests = self._rested < self._rest and self._resting == [entry.seq for entry in entries]
        if rests and self._rest_matched:
            self._rested += 1
            return
        began = self._clock()
        matches = self._match(entries)
        out.match_ms = out.predicted_draft_ms = (self._clock() - began) * 1e3
        at = [i for i, entry in enumerate(entries) if entry.samples]
        sampling = [entries[i] for i in at]
        matched = any(matches[entry.seq] for entry in sampling)
        if (rests and not matched) or not self._may_draft(sampling, matches):
            self._rested += bool(sampling)
            return
        step = out.step = self._inputs(sampling, sum(entry.prefill for entry in entries), matches, out)
        while (plan := self._decide(step, out)).requests:
            for request in plan.requests:
                step.drafted[request.drafter] = self._run(request, sampling, step, out)
        estimates = self.controller.estimates
        out.predicted_draft_ms += estimates.lookups_ms(sum(estimates.lookups_proposed(step)))
        out.plan, self._rest, self._rested = plan, plan.rest, 0
        self._resting, self._rest_matched = [entry.seq for entry in entries] if plan.rest else [], matched
        for i, tree, kept in zip(at, plan.trees, plan.kept, strict=True):
            out.trees[i] = tree.subtree(kept)

    def learn(self, out: Proposals, outcome: Outcome) -> float:
        """Learn from a finished step, and return the milliseconds it took; the next one may already be decided."""
        if out.step is None or out.plan is None:
            return 0.0
        began = self._clock()
        self.controller.observe(out.step, out.plan, outcome)
        took = (self._clock() - began) * 1e3
        out.control_ms += took
        return took

    def _decide(self, step: StepInputs, out: Proposals) -> Plan:
        began = self._clock()
        plan = self.controller.decide(step)
        out.control_ms += (self._clock() - began) * 1e3
        return plan

    def _match(self, entries: Seq[PlanEntry]) -> dict[Sequence, list[str]]:
        """Per sequence, the lookup drafters with a match. They read prompts while these are prefilled."""
        manager, found = self._manager, {entry.seq: list[str]() for entry in entries}
        least = {entry.seq: self._least_match(entry) for entry in entries}
        for name in manager.lookups:
            able = [seq for seq in found if manager.may_propose(name, seq)]
            for seq, match in zip(able, manager.match(name, able), strict=True) if able else ():
                if match >= least[seq]:
                    found[seq].append(name)
        return found

    def _least_match(self, entry: PlanEntry) -> Match:
        """The weakest match to draft after. Each request's first token takes any, which measures proposals again."""
        any_match = not entry.seq.n_output or entry.seq.request.speculation.mode is SpeculationMode.ON
        return Match.WEAK if any_match else self.controller.estimates.least_match

    def _may_draft(self, sampling: Seq[PlanEntry], matches: Mapping[Sequence, Seq[str]]) -> bool:
        """Whether a model-based drafter, or a lookup drafter with a match, may propose in this step."""
        manager = self._manager
        return any(
            entry.nodes and (matches[entry.seq] or any(manager.may_propose(name, entry.seq) for name in manager.models))
            for entry in sampling
        )

    def _inputs(
        self, sampling: Seq[PlanEntry], prefill_rows: int, matches: Mapping[Sequence, Seq[str]], out: Proposals
    ) -> StepInputs:
        """The controller's inputs of the step."""
        began = self._clock()
        contexts = [entry.seq.n_computed + entry.prefill for entry in sampling]
        prices = self.controller.estimates.prices(contexts, prefill_rows)
        out.control_ms += (self._clock() - began) * 1e3
        sequences = [self._sequence_inputs(entry, matches[entry.seq], prices.plain_ms) for entry in sampling]
        return StepInputs(prices, sequences, prefill_rows, rested=self._rested)

    def _sequence_inputs(self, entry: PlanEntry, matches: Seq[str], step_ms: float) -> SequenceInputs:
        seq, manager = entry.seq, self._manager
        if seq.history is None:  # mode OFF has one too: it takes part in the batch, not in drafting
            seq.history = self.controller.enter(seq.request.sampling.temperature)
        able = [name for name in manager.models if manager.may_propose(name, seq)]
        pending_prefill = {name: manager.pending_prefill(name, seq) for name in able}
        # A fault there disables a drafter
        drafters = [*matches, *(name for name in able if manager.may_propose(name, seq))]
        return SequenceInputs(
            seq.history,
            seq.tokens[-1],
            entry.nodes,
            seq.room,
            drafters,
            seq.request.speculation.mode is SpeculationMode.ON,
            tokens_due(seq, step_ms),
            entry.prefill > 0,
            pending_prefill,
            seq.n_output,
        )

    def _run(self, request: DraftRequest, sampling: Seq[PlanEntry], step: StepInputs, out: Proposals) -> DraftWork:
        """Run one drafter for the sequences that the controller selected."""
        name, decisions, chunks = request.drafter, request.decisions, request.prefill
        if not (request.proposing or chunks):
            return DraftWork([None] * len(sampling), decisions=decisions, pending=request.pending)
        tasks = [
            None if floor is None else self._task(request, entry, one, decision, floor)
            for entry, one, decision, floor in zip(sampling, step.sequences, decisions, request.floors, strict=True)
        ]
        pending = sum(tokens for tokens, task in zip(request.pending, tasks, strict=True) if task)
        for i, tokens in chunks.items():
            tasks[i] = DraftTask(sampling[i].seq, 0, 0, 1, name, prefill=tokens)
        for task, tokens, one in zip(tasks, request.pending, step.sequences, strict=True):
            if task is not None:
                task.tail = tokens < one.pending_prefill.get(name, (0, 0))[0]
        prefilled = sum(chunks.values())
        work = self._manager.propose(name, tasks, pending + prefilled)
        work.decisions, work.prefilled, work.pending = decisions, prefilled, request.pending
        estimates = self.controller.estimates
        out.predicted_draft_ms += estimates.draft_ms(name, request.proposing, work.levels)
        if name in estimates.costs:
            out.predicted_draft_ms += estimates.costs[name].prefill_ms(pending + prefilled)
        grammars = sum(entry.seq.sampling.grammar is not None for entry in sampling)
        share_s = GRAMMAR_BUDGET_S / max(1, grammars)
        work.trees = [
            None if tree is None or i in chunks else self._lawful(entry.seq, tree, share_s, out)
            for i, (entry, tree) in enumerate(zip(sampling, work.trees, strict=True))
        ]
        return work

    def _task(
        self, request: DraftRequest, entry: PlanEntry, one: SequenceInputs, decision: DraftDecision, floor: float
    ) -> DraftTask:
        seq, odds = entry.seq, self.controller.odds(request.drafter, one)
        if one.forced:
            return DraftTask(seq, entry.nodes, seq.max_depth, seq.width, request.drafter, odds)
        shallow = decision is DraftDecision.PROBE and not self._manager.tree_rows[request.drafter]
        depth = min(seq.max_depth, PROBE_DEPTH) if shallow else seq.max_depth
        return DraftTask(seq, entry.nodes, depth, seq.width, request.drafter, odds, floor, request.expansion)

    def _lawful(self, seq: Sequence, tree: TokenTree, share_s: float, out: Proposals) -> TokenTree | None:
        """``tree`` without nodes that the request's grammar forbids (most drafters ignore grammars); None: a fault.

        share_s: the sequence's share of the step's time for grammars, for all drafters together.
        """
        grammar = seq.sampling.grammar
        if grammar is None or len(tree) == 1:
            return tree
        lawful, began_s, spent_s = {0}, self._clock(), out.grammar_s.get(seq, 0.0)
        try:
            for node in range(1, len(tree)):
                if spent_s + self._clock() - began_s > share_s:
                    break
                if tree.parents[node] in lawful:
                    token = tree.tokens[node]
                    mask = grammar.mask(tree.path_tokens(tree.parents[node]))
                    if mask[token >> 5] >> (token & 31) & 1:
                        lawful.add(node)
        except Exception as error:
            out.faults.append((seq, StageError.of(error, "grammar")))
            return None
        out.grammar_s[seq] = spent_s + self._clock() - began_s
        if len(lawful) == len(tree):
            return tree
        return tree.subtree(sorted(lawful - {0}, key=lambda n: -tree.scores[n]))


def _plain(entries: Seq[PlanEntry]) -> Proposals:
    """Trees of one node: plain decode."""
    return Proposals([TokenTree(entry.seq.tokens[-1]) if entry.samples else None for entry in entries])


def tokens_due(sequence: Sequence, step_ms: float) -> float:
    """Tokens that the coming step should yield for ``sequence`` to meet its target time per token or its deadline.

    0 without such an objective. step_ms: duration of a step.
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
