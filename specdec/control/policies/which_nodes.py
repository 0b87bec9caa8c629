"""Which nodes are verified: drafters' trees merged into one, and its best nodes by expected goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from specdec.control.inputs import Plan, SequenceInputs
from specdec.control.params import DEFAULT_PARAMS, ControlParams
from specdec.core.tree import TokenTree


def merge(trees: Sequence[TokenTree]) -> TokenTree:
    """Merge the draft nodes of ``trees``, which share their pending token, into one tree.

    A node with several proposers has the best of their chances: they read the same text.
    """
    proposals = [tree for tree in trees if len(tree.tokens) > 1]
    if len(proposals) < 2:
        return proposals[0] if proposals else TokenTree(trees[0].tokens[0])
    merged = TokenTree(trees[0].tokens[0])
    chances = [1.0]
    for tree in proposals:
        nodes = {0: 0}
        for node in range(1, len(tree)):
            parent = nodes[tree.parents[node]]
            chance = math.exp(min(0.0, tree.scores[node] - tree.scores[tree.parents[node]]))
            known = merged.child(parent, tree.tokens[node])
            if known is not None:
                chances[known] = max(chances[known], chance)
            else:
                chances.append(chance)
            nodes[node] = merged.add(parent, tree.tokens[node], -math.inf, tree.sources[node], tree.cells[node])
    for node in range(1, len(merged)):
        merged.scores[node] = merged.scores[merged.parents[node]] + math.log(max(chances[node], 1e-9))
    return merged


def choose(
    sequences: Sequence[SequenceInputs],
    trees: Sequence[TokenTree],
    costs: Sequence[float],
    draft_ms: float,
    rate: float = 0.0,
    prompts_ms: float = 0.0,
    params: ControlParams = DEFAULT_PARAMS,
) -> Plan:
    """The nodes to verify: maximise (N + sum of the B best chances) / (draft_ms + costs[B] - prompts_ms) over B.

    The plan lacks `verify_ms`.

    B stops where a node earns less than ``rate``: slow drafting or prompts in the same forward do not make a token
    worth more. One order covers all sequences. A chance never exceeds its parent's, so the best B nodes form trees.
    Nodes of forced sequences come first, then nodes that a sequence needs to meet its objective, as far as they make
    such sequences faster. Other nodes of a sequence whose prompt ends in this step may lengthen it by
    `first_token_delay` at most.

    costs: milliseconds of the forward by draft nodes, from 0. draft_ms: time spent drafting. rate: tokens per
    millisecond that other steps earn. prompts_ms: part of the forward that prompts take.
    """
    # Lists, not arrays: after a forward has streamed gigabytes through the caches, a numpy call takes about 10 us.
    first_cap = sum([ms <= costs[0] * (1.0 + params.first_token_delay) for ms in costs[1:]])
    owners, nodes, chances = _candidates(sequences, trees, first_cap)
    order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)  # stable: a parent before its child
    top = len(costs) - 1
    spent = [draft_ms - prompts_ms + costs[min(count, top)] for count in range(len(order) + 1)]
    must = _required(sequences, owners, order, chances, spent)
    if must:
        order = [at for at in order if at in must] + [at for at in order if at not in must]
    least = len(must)
    most = max(least, min(len(order), top))
    tokens = list(accumulate([chances[at] for at in order[:most]], initial=float(len(sequences))))
    spent = spent[least : most + 1]
    values = [earned / ms for earned, ms in zip(tokens[least:], spent, strict=True)]
    left = [earned - rate * ms for earned, ms in zip(tokens[least:], spent, strict=True)]
    best = least + min(values.index(max(values)), left.index(max(left)))
    kept: list[list[int]] = [[] for _ in trees]
    for at in order[:best]:
        kept[owners[at]].append(nodes[at])
    return Plan([], list(trees), kept, len(order), tokens[best])


def _candidates(
    sequences: Sequence[SequenceInputs], trees: Sequence[TokenTree], first_cap: int
) -> tuple[list[int], list[int], list[float]]:
    """Nodes that may be verified: index of the sequence, node, and chance of being reached.

    first_cap: most nodes of a sequence whose prompt ends in this step.
    """
    owners: list[int] = []
    nodes: list[int] = []
    chances: list[float] = []
    for i, (one, tree) in enumerate(zip(sequences, trees, strict=True)):
        n = len(tree.tokens) - 1
        if not n:
            continue
        scores = tree.scores
        mine: Sequence[int] = range(1, n + 1)
        cap = min(one.nodes, first_cap) if one.first and not one.forced and one.due <= 1 else one.nodes
        if n > cap:
            mine = sorted(mine, key=lambda node: (-scores[node], node))[:cap]
        owners += [i] * len(mine)
        nodes += mine
        chances += [math.exp(scores[node]) for node in mine]
    return owners, nodes, chances


def _required(
    sequences: Sequence[SequenceInputs],
    owners: Sequence[int],
    order: Sequence[int],
    chances: Sequence[float],
    spent: Sequence[float],
) -> set[int]:
    """Candidates that are verified before all others: those of forced sequences, and those that sequences behind their
    objectives need, up to the one beyond which they would only become slower.

    order: all candidates, best first. spent: milliseconds of the step by draft nodes, from 0.
    """
    forced = {i for i, one in enumerate(sequences) if one.forced}
    due = {i: one.due for i, one in enumerate(sequences) if one.due > 1 and not one.forced}
    must = {at for at in order if owners[at] in forced} if forced else set()
    if due:
        reached, needed = dict.fromkeys(due, 1.0), []
        for at in order:
            owner = owners[at]
            if owner in due and reached[owner] < due[owner]:
                reached[owner] += chances[at]
                needed.append(at)
        tokens = accumulate([chances[at] for at in needed], initial=float(len(due)))
        values = [earned / ms for earned, ms in zip(tokens, spent[len(must) :], strict=False)]
        must.update(needed[: values.index(max(values))])
    return must
