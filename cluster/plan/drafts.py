"""Speculation in a simulation: draft nodes and tokens per step, sampled from recorded steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from cluster.plan.profile import DraftedStep, Overheads
from draft.manager import DrafterManager
from specdec.control.controller import Controller
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.engine.propose import Drafting, Proposals
from specdec.engine.scheduler import PlanEntry

_PLAIN = DraftedStep(sequences=((0, 1),))  # no draft node, one token


class DraftLaw:
    """Samples a recorded step with about as many sequences: the controller drafts fewer nodes per sequence in larger
    batches. Without ``steps`` nothing is drafted.
    """

    def __init__(self, steps: Seq[DraftedStep]) -> None:
        steps = steps or (_PLAIN,)
        self.most = max(nodes for step in steps for nodes, _ in step.sequences)
        self._by_size: dict[int, list[DraftedStep]] = {}
        for step in steps:
            self._by_size.setdefault(len(step.sequences), []).append(step)

    def draw(self, sequences: int, rng: random.Random) -> DraftedStep:
        """Returns a random step of the nearest recorded number of sequences."""
        nearest = min(self._by_size, key=lambda size: (abs(size - sequences), -size))
        return rng.choice(self._by_size[nearest])


def _tree(nodes: int) -> TokenTree:
    tree = TokenTree(0)
    for node in range(nodes):
        tree.add(node, 0, 0.0, "")
    return tree


_TREES = [_tree(nodes) for nodes in range(MAX_NODES)]  # their content does not matter here, so sequences share them


class SimulatedDrafting(Drafting):
    """The propose stage of a simulation: trees of random sizes, and the time of a step outside its forward.

    drawn: receives the tokens of each entry of the step. spend: advances the clock by milliseconds.
    """

    def __init__(
        self,
        panel: DrafterManager,
        controller: Controller,
        law: DraftLaw,
        overheads: Overheads,
        rng: random.Random,
        drawn: list[int],
        spend: Callable[[float], None],
    ) -> None:
        super().__init__(panel, controller)
        self._law, self._overheads, self._rng, self._drawn, self._spend = law, overheads, rng, drawn, spend

    def want(self, sequence: Sequence) -> int:
        """The largest recorded tree: the final size depends on the other sequences of the step."""
        return max(0, min(self._law.most, sequence.room - 1))

    def propose(self, entries: Seq[PlanEntry]) -> Proposals:
        """Returns trees of the sampled sizes, as far as they are granted."""
        self._drawn.clear()
        if not entries:
            return Proposals([])
        sampling = sum(entry.samples for entry in entries)
        step = self._law.draw(sampling, self._rng)
        lines, taken = step.sequences, 0
        trees: list[TokenTree | None] = []
        for entry in entries:
            if entry.samples:
                nodes, tokens = lines[taken % len(lines)]
                granted, taken = min(nodes, entry.nodes), taken + 1
                trees.append(_TREES[granted])
                self._drawn.append(min(tokens, granted + 1))
            else:
                trees.append(None)
                self._drawn.append(0)
        draft_ms = step.draft_ms * max(1.0, sampling / len(lines)) if sampling else 0.0
        self._spend(self._overheads.step_ms + self._overheads.step_ms_per_sequence * len(entries) + draft_ms)
        return Proposals(trees)  # without a decision, of which the controller could learn
