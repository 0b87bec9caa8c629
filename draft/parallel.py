"""Drafts a whole tree in one forward of a small model, by mask tokens after the text (PARD)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from itertools import accumulate, count

from torch import Tensor

from draft.growth import Growth
from draft.model import ModelDrafter
from draft.protocol import DraftTask
from specdec.core.tree import TokenTree
from verify_kernels.forward_batch import PAGE_SIZE

POSITIONS = 8  # predicted at most; with the tokens of a usual step, no more rows than one pass over the weights serves

Choices = list[tuple[int, float]]
"""Tokens of a position, the target's likeliest choice first, with their log-probabilities."""


class ParallelDrafter(ModelDrafter):
    """Drafts with a model that was trained to fill in mask tokens (An et al., arXiv 2504.18583).

    One forward computes the tokens without KV and `POSITIONS` - 1 mask tokens behind them. The last token predicts the
    first position of the tree, each mask the next one. A prediction does not depend on the path to it, so all nodes of
    a level have the same children. The next forward overwrites the masks' KV.

    The model's configuration has a ``mask_token``. `ModelDrafter` reads the texts.
    """

    name = "parallel"
    tree_rows = POSITIONS

    def _look_ahead(self, growing: Seq[Growth]) -> None:
        """As many masks as each task has use for, and the forward and the sequence's pages have room for."""
        decoder, mask = self._decoder, self._decoder.config.mask_token
        assert mask is not None
        for growth in growing:
            task, most = growth.task, min(decoder.max_rows, decoder.max_logit_rows) // len(growing)
            positions = min(POSITIONS, task.max_depth, task.max_nodes, most)
            room = len(growth.pages) * PAGE_SIZE - growth.base - 1
            growth.ahead = [mask] * max(0, min(positions - 1, room))

    def _expand(self, growing: Seq[Growth], logits: Tensor) -> list[Growth]:
        """Fill all trees. logits: of each growth's positions in order. Returns nothing to expand further."""
        counts = [1 + len(growth.ahead) for growth in growing]
        for growth, choices in zip(growing, self._choices(growing, counts, logits), strict=True):
            grow(growth.task, growth.tree, choices)
        return []

    def _choices(self, growing: Seq[Growth], counts: Seq[int], logits: Tensor) -> list[list[Choices]]:
        """By growth and position. counts: positions of each growth.

        Penalties, bans and grammars of a position are those after the best choices before it. Where they apply, one
        position follows the other.
        """
        width = max(growth.task.width for growth in growing)
        found: list[list[Choices]] = [[] for _ in growing]
        if all(growth.row(()).edits is None for growth in growing):
            rows = [g.row(range(at)) for g, n in zip(growing, counts, strict=True) for at in range(n)]
            children = iter(self._children(logits, rows, width))
            return [[next(children) for _ in range(n)] for n in counts]
        starts = [0, *accumulate(counts)]
        paths: list[list[int]] = [[] for _ in growing]
        for at in range(max(counts)):
            open_ = [i for i, n in enumerate(counts) if at < n and len(paths[i]) == at]
            chosen, rows = logits[[starts[i] + at for i in open_]], [growing[i].row(paths[i]) for i in open_]
            for i, best in zip(open_, self._children(chosen, rows, width), strict=True):
                found[i].append(best)
                paths[i] += [token for token, _ in best[:1]]
        return found


def grow(task: DraftTask, tree: TokenTree, choices: Seq[Choices]) -> None:
    """Fill ``tree`` with the nodes that are likeliest to be reached, where all nodes of a depth have the same children.

    choices: by depth, from the root's children on.
    """
    order = count()  # breaks ties, so that trees are reproducible
    heap: list[tuple[float, int, int, int, int, float]] = []  # (minus score, order, parent, rank, token, probability)

    def offer(parent: int) -> None:
        depth, above = tree.depths[parent], tree.scores[parent]
        if depth >= min(task.max_depth, len(choices)):
            return
        for rank, (token, logprob) in enumerate(choices[depth][: task.width]):
            prob = math.exp(logprob)
            score = above + task.odds(rank, depth + 1, prob)[0]
            if score >= task.floor:
                heapq.heappush(heap, (-score, next(order), parent, rank, token, prob))

    offer(0)
    while heap and len(tree) <= task.max_nodes:
        _, _, parent, rank, token, prob = heapq.heappop(heap)
        node = task.add(tree, parent, token, prob, rank)
        if node >= 0:
            offer(node)
