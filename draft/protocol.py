"""What every drafter is to the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from specdec.control.inputs import TreeExpansion
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree

Odds = Callable[[int, int, float], tuple[float, int]]
"""(rank, depth, prob) -> (log of the chance that such a child is accepted once its parent is, calibration cell)."""

_LEAST = 1e-6


def raw_odds(rank: int, depth: int, prob: float) -> tuple[float, int]:
    """A drafter's probabilities taken at their word: what is used where no controller calibrates them."""
    return math.log(min(1.0, max(prob, _LEAST))), -1


# Not frozen: that takes five times as long to make, and there is one per sequence, drafter and step.
@dataclass(slots=True)
class DraftTask:
    """One sequence's turn with one drafter. ``max_nodes`` 0: propose nothing, but work that must keep up may be done;
    of a model-based drafter's backlog ``reads`` tokens, so that no step takes too long.

    ``sequence.tokens`` are all committed; the last is the pending token, the root of the tree to fill.
    ``source``: the drafter's name. ``odds`` turns its probabilities into calibrated ones. ``floor``: a node whose
    score (log of the chance that it is reached) lies below is not worth proposing, nor its children.
    ``deepening``: says after each level which nodes are worth a forward of a model-based drafter to find their
    children, and which of the trees that grow together should go on; None: all.
    """

    sequence: Sequence
    max_nodes: int
    max_depth: int
    width: int
    source: str = ""
    odds: Odds = raw_odds
    floor: float = -math.inf
    deepening: TreeExpansion | None = None
    reads: int = 0

    @property
    def level_floor(self) -> float:
        """Log of the least chance of being reached for which a node is worth a forward to find its children."""
        return -math.inf if self.deepening is None else self.deepening.floor

    def add(self, tree: TokenTree, parent: int, token: int, prob: float, rank: int = 0) -> int:
        """Propose ``token`` under ``parent``; returns its node, or -1 where it is not worth it or there is no room.

        prob: the drafter's own estimate, in (0, 1], that the target chooses ``token`` once it is at ``parent``.
        rank: 0 for the drafter's first choice at ``parent``, 1 for its second, and so on.
        """
        depth = tree.depths[parent] + 1
        chance, cell = self.odds(rank, depth, prob)
        score = tree.scores[parent] + chance
        full = len(tree) > self.max_nodes or len(tree) >= MAX_NODES
        if score < self.floor or depth > self.max_depth or (full and tree.child(parent, token) is None):
            return -1
        return tree.add(parent, token, score, self.source, cell)


class Drafter:
    """Proposes trees. A drafter can be wrong, slow or broken; it can not change what comes out.

    ``propose`` is all that one must have. ``name``: its own among the drafters of an engine. ``model_based``: proposing
    takes a model's forward (`ModelBasedDrafter`), so it is asked only where that pays; the others look up.
    """

    name: str
    model_based: bool = False

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """One tree per task, rooted at the pending token, at most ``max_nodes`` draft nodes."""
        raise NotImplementedError

    def serves(self, sequence: Sequence) -> bool:
        """Whether it has anything to go on: where not, it never hears of the sequence."""
        return True

    def begin(self, sequence: Sequence) -> None:
        """A sequence enters; ``sequence.tokens`` holds its prompt."""

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """The target's auxiliary hidden states of positions ``start`` on, float32 [n, layers * hidden]: committed
        tokens, in order. They are a view, and told before `observe`."""

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """``tokens`` were committed (they are at the end of ``sequence.tokens`` already)."""

    def rewind(self, sequence: Sequence) -> None:
        """The sequence lost its KV (preemption); its tokens stay."""

    def end(self, sequence: Sequence) -> None:
        """The sequence left; forget it. Called once, also for sequences that failed."""


class ModelBasedDrafter(Drafter):
    """A drafter that runs a model. ``digest``: of its weights, by which the next engine finds what was learned of it;
    empty: not known."""

    model_based = True
    digest = ""

    def backlog(self, sequence: Sequence) -> int:
        """Tokens of a sequence that was begun which it must read before it can propose for it."""
        raise NotImplementedError

    def warm_up(self, rows: int) -> None:
        """Run one level's forward over ``rows`` made-up rows, to time it; before any sequence begins."""
        raise NotImplementedError
