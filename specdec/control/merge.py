"""Several drafters' trees become one trie: competing sources need no arbitration."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.tree import MAX_NODES, TokenTree

AGREEMENT = 0.5  # of the way from the better chance to that of independent witnesses: drafters read the same text
FULL = 0.995  # siblings exclude each other, so their chances sum to less than 1


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """All draft nodes of ``trees``, which share their pending token, as far as one tree has room.

    A node proposed by several counts for all of them, and its chance rises: between the better of the two and
    1 - (1 - a)(1 - b). Siblings' chances are scaled down where they would sum to more than 1.

    Raises:
        ValueError: the trees have different roots.
    """
    if any(tree.tokens[0] != trees[0].tokens[0] for tree in trees):
        raise ValueError("trees: must share their pending token")
    proposals = _fitting([tree for tree in trees if len(tree.tokens) > 1])
    if not proposals or (len(proposals) == 1 and _sums_up(proposals[0])):
        return proposals[0] if proposals else TokenTree(trees[0].tokens[0])
    merged = TokenTree(trees[0].tokens[0])
    chances = [1.0]
    for tree in proposals:
        nodes = {0: 0}
        for node in range(1, len(tree)):
            parent = nodes.get(tree.parents[node])
            if parent is None:
                continue
            chance = math.exp(min(0.0, tree.scores[node] - tree.scores[tree.parents[node]]))
            known = merged.child(parent, tree.tokens[node])
            if known is not None:
                chances[known] = _combined(chances[known], chance)
            else:
                chances.append(chance)
            nodes[node] = merged.add(parent, tree.tokens[node], -math.inf, tree.sources[node], tree.cells[node])
    _score(merged, chances)
    return merged


def _fitting(trees: list[TokenTree]) -> list[TokenTree]:
    """``trees`` without their least likely nodes, where all together might not fit into one."""
    total = sum(len(tree) - 1 for tree in trees)
    if total < MAX_NODES:
        return trees
    scores = sorted((score for tree in trees for score in tree.capped_scores()[1:]), reverse=True)
    least = scores[MAX_NODES - 2]
    room = MAX_NODES - 1 - sum(score > least for score in scores)
    fitting = []
    for tree in trees:
        capped = tree.capped_scores()
        above = sum(score > least for score in capped[1:])
        equal = min(room, sum(score == least for score in capped[1:]))
        room -= equal
        fitting.append(tree.best(above + equal))
    return [tree for tree in fitting if len(tree) > 1]


def _sums_up(tree: TokenTree) -> bool:
    """Whether the chances of no node's children sum to more than they can."""
    totals = [0.0] * len(tree)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        totals[parent] += math.exp(min(0.0, tree.scores[node] - tree.scores[parent]))
    return max(totals) <= FULL


def _combined(one: float, other: float) -> float:
    best = max(one, other)
    return best + AGREEMENT * (1.0 - (1.0 - one) * (1.0 - other) - best)


def _score(tree: TokenTree, chances: Sequence[float]) -> None:
    """Log-chances along each path, siblings scaled to leave room for what nobody proposed."""
    totals = [0.0] * len(tree)
    for node in range(1, len(tree)):
        totals[tree.parents[node]] += chances[node]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        share = chances[node] * min(1.0, FULL / totals[parent])
        tree.scores[node] = tree.scores[parent] + math.log(max(share, 1e-9))
