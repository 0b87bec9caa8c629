"""The protocol of drafters."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from specdec.control.inputs import Match, Odds, TreeExpansion
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree

_MIN_PROB = 1e-6  # lower bound of a probability, so that its log is finite


def raw_odds(rank: int, depth: int, prob: float) -> tuple[float, int]:
    """The drafter's own probabilities, where no controller calibrates them."""
    return math.log(min(1.0, max(prob, _MIN_PROB))), -1


# Not frozen: that makes construction five times slower, and each step makes one per sequence and drafter.
@dataclass(slots=True)
class DraftTask:
    """One sequence's turn with one drafter."""

    sequence: Sequence
    """All of its tokens are committed; the last one is the pending token, the root of the tree."""
    max_nodes: int
    """Maximum draft nodes; 0: propose nothing."""
    max_depth: int
    width: int
    """Maximum children of a node."""
    source: str = ""
    """The drafter's name."""
    odds: Odds = raw_odds
    """Turns the drafter's probabilities into calibrated ones."""
    floor: float = -math.inf
    """Score, the log of the chance of being reached, below which a node is not proposed."""
    expansion: TreeExpansion | None = None
    """Decides after each level which nodes and trees grow further; None: all."""
    prefill: int = 0
    """With `max_nodes` 0: tokens of pending prefill that a model-based drafter computes in this step."""
    tail: bool = False
    """A model-based drafter reads the end of the text alone (`ModelBasedDrafter.tail_prefill`)."""
    begun: bool = True
    """A model-based drafter sets it to False where it cannot propose, so runs no forward."""

    @property
    def level_floor(self) -> float:
        """Score below which a node is not expanded."""
        return -math.inf if self.expansion is None else self.expansion.floor

    def add(self, tree: TokenTree, parent: int, token: int, prob: float, rank: int = 0) -> int:
        """Propose ``token`` under ``parent``; returns its node, or -1 if it is too unlikely or the tree is full.

        prob: the drafter's own estimate, in (0, 1], that the target chooses ``token`` at ``parent``. rank: 0 for the
        drafter's first choice at ``parent``, 1 for its second, and so on.
        """
        depth = tree.depths[parent] + 1
        chance, cell = self.odds(rank, depth, prob)
        score = tree.scores[parent] + chance
        full = len(tree) > self.max_nodes or len(tree) >= MAX_NODES
        if score < self.floor or depth > self.max_depth or (full and tree.child(parent, token) is None):
            return -1
        return tree.add(parent, token, score, self.source, cell)


class Drafter:
    """Proposes trees. A wrong, slow or broken drafter cannot change the output.

    A drafter has a `fill`, or a `propose` of its own if it drafts for several sequences together.
    """

    name: str
    """Unique among the drafters of an engine."""
    model_based: bool = False
    """Proposing takes a forward of a model, so the controller weighs its cost; lookup drafters are nearly free."""
    tree_rows: int = 0
    """Of a drafter that grows a whole tree in one forward, the rows in it of a sequence with one new token; 0: a
    model-based drafter grows a level in each forward."""

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """One tree per task, rooted at the pending token, at most ``max_nodes`` draft nodes. By default `fill` adds
        these, tree by tree."""
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        for task, tree in zip(tasks, trees, strict=True):
            self.fill(task, tree)
        return trees

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        """Add the draft nodes of ``task`` to ``tree``, which is the pending token alone."""
        raise NotImplementedError

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        """Per sequence, how much text the proposals of `propose` would follow.

        The engine calls it for lookup drafters, before `propose` and while prompts are prefilled, so new tokens are
        processed here. With `Match.NONE` it does not call `propose`, which spares most of a step's decision. With
        `Match.WEAK` it does where proposals are cheap, for first tokens and in mode ON.
        """
        return [Match.STRONG] * len(sequences)

    def serves(self, sequence: Sequence) -> bool:
        """Whether it can draft for ``sequence`` at all. If not, no other method is called for it."""
        return True

    def begin(self, sequence: Sequence) -> None:
        """A sequence starts; ``sequence.tokens`` holds its prompt. Called again amid the text when another drafter has
        been replaced."""

    def features(self, sequence: Sequence, start: int, rows: Tensor) -> None:
        """The target's auxiliary hidden states of committed tokens from position ``start`` on.

        rows: float32 [n, layers * hidden], a view. Called before `observe` of the same tokens.
        """

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """``tokens`` were committed; they are the end of ``sequence.tokens``."""

    def rewind(self, sequence: Sequence) -> None:
        """The sequence lost its KV (preemption); its tokens stay."""

    def end(self, sequence: Sequence) -> None:
        """The sequence ended; release its state. Called once, also after a failure."""


class ModelBasedDrafter(Drafter):
    """A drafter that runs a model."""

    model_based = True
    digest = ""
    """Digest of its weights, the key of its estimates in the profile cache; empty: they are not cached."""
    acceptance: tuple[float, ...] = ()
    """By position from 1, the share of its proposals that its publisher saw accepted; empty: unknown."""

    def pending_prefill(self, sequence: Sequence) -> int:
        """Tokens of a started sequence that it must compute before it can propose."""
        raise NotImplementedError

    def tail_prefill(self, sequence: Sequence) -> int:
        """The same if it reads the end of the text alone. By default it always reads the whole."""
        return self.pending_prefill(sequence)

    def warm_up(self, rows: int) -> None:
        """Run one level's forward over ``rows`` dummy rows, to time it. Called before any sequence starts."""
        raise NotImplementedError
