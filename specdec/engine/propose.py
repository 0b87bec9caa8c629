"""Propose: which drafters are asked, what they propose merged into one tree each, and which nodes are verified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.panel import DraftPanel
from draft.protocol import DraftTask
from specdec.config import SpeculationConfig
from specdec.control.controller import Controller, Decided
from specdec.control.gates import Pace
from specdec.control.state import DraftWork, Outcome, Turn
from specdec.control.tree_budget import Choice, merge
from specdec.engine.scheduler import PlanEntry
from specdec.engine.sequence_state import DraftCaps, SequenceState
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from specdec.types import SpeculationMode


def tokens_due(sequence: Sequence, room: int, step_ms: float) -> float:
    """Tokens the coming step should yield so that ``sequence`` keeps its target time per token, or ends before its
    deadline; 0 where it has no such objective. ``room``: tokens it may still emit; ``step_ms``: what a step takes.
    """
    target = sequence.request.target_tpot_ms
    if target is None and sequence.deadline is None:
        return 0.0
    due, now = 0.0, time.monotonic()
    if target is not None and sequence.first_token_s is not None:
        elapsed_ms = (now - sequence.first_token_s) * 1e3
        due = (elapsed_ms + step_ms) / target - (sequence.n_output - 1)
    if sequence.deadline is not None and sequence.request.stopping.max_tokens is not None:
        left_ms = max((sequence.deadline - now) * 1e3, step_ms)
        due = max(due, room * step_ms / left_ms)
    return max(0.0, due)


PROBE_DEPTH = 3  # a probe asks whether drafting pays again, not how far


@dataclass(slots=True)
class Proposals:
    """What one step drafts. trees: one per plan entry, None while its prompt is prefilled. The rest is the
    controller's: turns (one per tree), what it decided by costly drafter, what each drafter did, and its choice.
    ``late``: it had not learned from the step before when it decided this one."""

    trees: list[TokenTree | None]
    turns: list[Turn] = field(default_factory=list)
    prefill_rows: int = 0
    free: list[bool] = field(default_factory=list)
    decisions: dict[str, list[str]] = field(default_factory=dict)
    work: dict[str, DraftWork] = field(default_factory=dict)
    choice: Choice | None = None
    control_ms: float = 0.0
    predicted_draft_ms: float = 0.0
    predicted_verify_ms: float = 0.0
    decided: Decided | None = None
    late: bool = False


class Drafting:
    """The propose stage. With nothing to draft for, it hands out trees of one node and touches nothing else."""

    def __init__(
        self,
        panel: DraftPanel,
        controller: Controller,
        config: SpeculationConfig,
        states: Mapping[Sequence, SequenceState],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._panel, self.controller, self._config, self._states, self._clock = panel, controller, config, states, clock

    def begin(self, sequence: Sequence) -> None:
        """A sequence runs for the first time."""
        state = self._states[sequence]
        drafts = self._config.enabled and state.speculates
        if drafts:
            state.control = self.controller.enter(sequence.request.sampling.temperature)
        self._panel.begin(sequence, sequence.request.speculation.drafters if drafts else ())

    def want(self, sequence: Sequence) -> int:
        """The most draft nodes ``sequence`` may have verified: never more than it may still emit."""
        if not self._drafts(sequence) or not self._panel.may_draft(sequence, sequence.request.speculation.drafters):
            return 0
        caps = self._caps(sequence)
        return max(0, min(caps.nodes, self._states[sequence].room - 1)) if caps.depth else 0

    def propose(self, entries: Seq[PlanEntry]) -> Proposals:
        """One tree per entry."""
        out = Proposals([TokenTree(entry.seq.tokens[-1]) if entry.samples else None for entry in entries])
        self._keep_up(entries)
        at = [i for i, entry in enumerate(entries) if entry.samples]
        if not any(entries[i].nodes for i in at):
            return out
        sampling = [entries[i] for i in at]
        self._begin(sampling, sum(entry.chain for entry in entries), out)
        own: list[list[TokenTree]] = [[TokenTree(entry.seq.tokens[-1])] for entry in sampling]
        for name in self.controller.order:
            self._ask(name, sampling, own, out)
        merged = [merge(trees) for trees in own]
        began = self._clock()
        out.choice = self.controller.choose(merged, sum(done.ms for done in out.work.values()))
        out.control_ms += (self._clock() - began) * 1e3
        out.decided, out.predicted_verify_ms = self.controller.decided, self.controller.predicted_ms(out.choice.budget)
        for i, tree, kept in zip(at, merged, out.choice.kept, strict=True):
            out.trees[i] = tree.subtree(kept)
        return out

    def learn(self, out: Proposals, outcome: Outcome) -> None:
        """The step is over, and the next one maybe decided already."""
        began = self._clock()
        self.controller.observe(outcome, out.decisions, out.decided)
        out.control_ms += (self._clock() - began) * 1e3

    def _begin(self, sampling: Seq[PlanEntry], prefill_rows: int, out: Proposals) -> None:
        costly = [name for name in self.controller.order if self._panel.costly[name]]
        out.turns = [self._turn(entry, costly) for entry in sampling]
        out.prefill_rows = prefill_rows
        began = self._clock()
        self.controller.begin(out.turns, prefill_rows)
        plain_ms = self.controller.predicted_ms(0)
        for entry, turn in zip(sampling, out.turns, strict=True):
            turn.lag = tokens_due(entry.seq, turn.room, plain_ms)
        out.free = self.controller.free_gate()
        out.control_ms += (self._clock() - began) * 1e3

    def _turn(self, entry: PlanEntry, costly: Seq[str]) -> Turn:
        seq = entry.seq
        state = self._states[seq]
        if state.control is None:  # mode OFF: it takes part in the batch, not in drafting
            state.control = self.controller.enter(seq.request.sampling.temperature)
        backlog = {name: self._panel.backlog(name, seq) for name in costly if self._panel.trusts(name, seq)}
        forced = seq.request.speculation.mode is SpeculationMode.ON
        context = seq.n_computed + entry.chain
        return Turn(state.control, context, entry.nodes, state.room, forced, 0.0, entry.chain > 0, backlog)

    def _ask(self, name: str, sampling: Seq[PlanEntry], own: list[list[TokenTree]], out: Proposals) -> None:
        """Let one drafter propose for those it is worth asking for; adds its trees to ``own``."""
        costly = self._panel.costly[name]
        if not costly and not any(out.free):
            return
        eligible = [
            entry.nodes > 0 and (costly or free) and self._panel.trusts(name, entry.seq)
            for entry, free in zip(sampling, out.free, strict=True)
        ]
        began = self._clock()
        decisions = self.controller.gate(name, own, eligible) if costly else ["free" if e else "" for e in eligible]
        batch = sum(decision not in ("", "off") for decision in decisions)
        pace = self.controller.pace(name) if costly and batch else None
        floors = {decision: self.controller.node_floor(decision) for decision in {*decisions} - {"", "off"}}
        out.control_ms += (self._clock() - began) * 1e3
        if costly:
            out.decisions[name] = decisions
        if not batch:
            return
        deep = -math.inf if pace is None else pace.floor(batch)
        tasks = [
            self._task(name, entry, turn, decision, floors[decision], deep, pace) if decision in floors else None
            for entry, turn, decision in zip(sampling, out.turns, decisions, strict=True)
        ]
        backlog = sum(turn.backlog.get(name, 0) for turn, task in zip(out.turns, tasks, strict=True) if task)
        done = out.work[name] = self._panel.ask(name, tasks, backlog)
        if costly:
            out.predicted_draft_ms += self.controller.draft_ms(name, batch, done.levels)
        done.trees = [
            None if tree is None else self._lawful(entry.seq, tree)
            for entry, tree in zip(sampling, done.trees, strict=True)
        ]
        for trees, tree in zip(own, done.trees, strict=True):
            if tree is not None:
                trees.append(tree)

    def _task(
        self, name: str, entry: PlanEntry, turn: Turn, decision: str, floor: float, deep: float, pace: Pace | None
    ) -> DraftTask:
        caps = self._caps(entry.seq)
        sampling, odds = self._states[entry.seq].sampling, self.controller.odds(name, turn)
        if turn.forced:
            return DraftTask(entry.seq, sampling, entry.nodes, caps.depth, caps.width, name, odds)
        depth = min(caps.depth, PROBE_DEPTH) if decision == "probe" else caps.depth
        return DraftTask(entry.seq, sampling, entry.nodes, depth, caps.width, name, odds, floor, deep, pace)

    def _keep_up(self, entries: Seq[PlanEntry]) -> None:
        """Free drafters read prompts while these are prefilled."""
        waiting = [e for e in entries if not e.samples and self._drafts(e.seq)]
        if not waiting:
            return
        for name, costly in self._panel.costly.items():
            if not costly:
                tasks = [
                    DraftTask(entry.seq, self._states[entry.seq].sampling, 0, 0, 1, name)
                    if self._panel.trusts(name, entry.seq)
                    else None
                    for entry in waiting
                ]
                self._panel.ask(name, tasks)

    def _lawful(self, seq: Sequence, tree: TokenTree) -> TokenTree:
        """``tree`` without nodes that the request's grammar forbids: drafters of texts know nothing of it."""
        grammar = self._states[seq].sampling.grammar
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

    def _drafts(self, seq: Sequence) -> bool:
        return self._config.enabled and self._states[seq].speculates

    def _caps(self, seq: Sequence) -> DraftCaps:
        state = self._states[seq]
        if state.caps is None:
            state.caps = DraftCaps.of(seq.request.speculation, self._config)
        return state.caps
