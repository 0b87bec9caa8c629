"""A token tree that a feature head grows, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from draft.protocol import DraftTask
from specdec.tree import TokenTree
from verify_kernels.row_sampling import RowSampling


class HeadTree:
    """The tree of one task. ``frontier``: the nodes to expand next, all of one depth. ``hidden``: per node the hidden
    state that goes into its slot, float32 [hidden]: the root's x, and for a drafted node its parent's z.
    """

    def __init__(self, task: DraftTask) -> None:
        self.task = task
        self.tree = TokenTree(task.sequence.tokens[-1])
        self.frontier = [0]
        self.hidden: list[Tensor] = []

    def start(self, root: Tensor) -> None:
        """The root's x is known."""
        self.hidden = [root]

    def rows(self) -> list[RowSampling]:
        """How the children of each frontier node are sampled."""
        sequence, sampling, out = self.task.sequence, self.task.sampling, []
        for node in self.frontier:
            path = self.tree.path_tokens(node)
            out.append(sampling.row(len(sequence.tokens) + len(path), path, sequence.n_output + len(path)))
        return out

    def add(self, children: Seq[Seq[tuple[int, float]]], z: Tensor) -> bool:
        """Add the best children of the frontier, leaving room for deeper levels; whether it is worth going on.

        children: per frontier node (token, log-probability), best first. z: float32 [frontier, hidden], kept.
        """
        tree, task = self.tree, self.task
        left = task.max_nodes - (len(tree) - 1)
        levels = task.max_depth - tree.depths[self.frontier[0]]
        share = max(1, left // levels) if levels > 1 else left
        offered = [
            (rank, -(tree.scores[node] + logprob), at, token, logprob)
            for at, (node, options) in enumerate(zip(self.frontier, children, strict=True))
            for rank, (token, logprob) in enumerate(options[: task.width])
        ]
        # The first-ranked child holds the target's choice most often, whatever its probability.
        offered.sort()
        parents, self.frontier = self.frontier, []
        if task.level_floor > -math.inf:  # what pays is decided by chances then, not by a division of the budget
            share = left
        fresh = 0
        for rank, _, at, token, logprob in offered:
            if fresh == min(share, left):
                break
            node = task.add(tree, parents[at], token, math.exp(logprob), rank)
            if node == len(self.hidden):
                self.hidden.append(z[at])
                fresh += 1
                if tree.scores[node] >= task.level_floor:
                    self.frontier.append(node)
        return bool(self.frontier) and len(tree) <= task.max_nodes and levels > 1
