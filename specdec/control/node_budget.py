"""Several drafters' trees merged into one trie, and which of its nodes are worth verifying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdec.control.inputs import SequenceInputs
from specdec.core.tree import MAX_NODES, TokenTree

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


WORTHWHILE = 1.015  # less is within what the estimates err, and larger trees cost the host some time too


@dataclass(slots=True)
class Choice:
    """kept: per tree the nodes to verify, best first. predicted_tokens: expected tokens of the step, the target's own
    included. value: expected tokens per millisecond."""

    kept: list[list[int]]
    budget: int
    candidates: int
    predicted_tokens: float
    value: float


def choose(
    sequences: Sequence[SequenceInputs],
    trees: Sequence[TokenTree],
    costs: Sequence[float],
    draft_ms: float,
    rate: float = 0.0,
    prompts_ms: float = 0.0,
) -> Choice:
    """Maximise (N + sum of the B best chances) / (draft_ms + costs[B] - prompts_ms) over B, but no
    further than the last node earns ``rate``, the tokens per millisecond that other steps earn: a step that is slow
    already, since drafting it took long, makes none of its tokens worth more. Nor do prompts, which add ``prompts_ms``
    to the forward.

    One order over all sequences; since no chance exceeds its parent's, the best B always form trees. Nodes of forced
    sequences, and those a lagging one needs to keep its objective, come before all others and are not up for decision.
    ``costs``: milliseconds of the forward by draft nodes, from none to as many as it may have.
    """
    # Lists, not arrays: after a forward has gone through gigabytes, each call of numpy takes some 10 us.
    owners, nodes, chances = _candidates(sequences, trees)
    if not chances:
        return plain(sequences, costs[0] - prompts_ms, draft_ms)
    order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)  # stable: a parent before its child
    must = _must(sequences, owners, order, chances)
    if must:
        order = [at for at in order if at in must] + [at for at in order if at not in must]
    least, top = len(must), len(costs) - 1
    most = max(least, min(len(order), top))
    tokens = list(accumulate([chances[at] for at in order[:most]], initial=float(len(sequences))))
    spent = [draft_ms - prompts_ms + costs[min(count, top)] for count in range(least, most + 1)]
    values = [earned / ms for earned, ms in zip(tokens[least:], spent, strict=True)]
    left = [earned - rate * ms for earned, ms in zip(tokens[least:], spent, strict=True)]
    best = least + min(values.index(max(values)), left.index(max(left)))
    if least == 0 and values[best] < WORTHWHILE * values[0]:
        best = 0
    kept: list[list[int]] = [[] for _ in trees]
    for at in order[:best]:
        kept[owners[at]].append(nodes[at])
    return Choice(kept, best, len(order), tokens[best], values[best - least])


def plain(sequences: Sequence[SequenceInputs], verify_ms: float, draft_ms: float) -> Choice:
    """The choice where there is none: no drafter proposed anything, and the forward takes ``verify_ms``."""
    return Choice(
        [[] for _ in sequences], 0, 0, float(len(sequences)), len(sequences) / max(draft_ms + verify_ms, 1e-9)
    )


def _candidates(
    sequences: Sequence[SequenceInputs], trees: Sequence[TokenTree]
) -> tuple[list[int], list[int], list[float]]:
    """The nodes that may be verified: whose they are, which, and the chance that each is reached."""
    owners: list[int] = []
    nodes: list[int] = []
    chances: list[float] = []
    for i, (one, tree) in enumerate(zip(sequences, trees, strict=True)):
        n = len(tree.tokens) - 1
        if not n:
            continue
        scores = tree.capped_scores()
        mine: Sequence[int] = range(1, n + 1)
        if n > one.nodes:  # what may not be verified has no part in the decision
            mine = sorted(mine, key=lambda node: (-scores[node], node))[: one.nodes]
        owners += [i] * len(mine)
        nodes += mine
        chances += [math.exp(min(0.0, scores[node])) for node in mine]
    return owners, nodes, chances


def _must(
    sequences: Sequence[SequenceInputs], owners: Sequence[int], order: Sequence[int], chances: Sequence[float]
) -> set[int]:
    """Candidates that are verified whatever they cost; ``order``: all, best first."""
    due = {i: math.inf if one.forced else one.due for i, one in enumerate(sequences) if one.forced or one.due > 1}
    must: set[int] = set()
    if due:
        reached = dict.fromkeys(due, 1.0)
        for at in order:
            owner = owners[at]
            if owner in due and reached[owner] < due[owner]:
                reached[owner] += chances[at]
                must.add(at)
    return must
