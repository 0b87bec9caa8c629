"""Several drafters' trees become one trie: competing sources need no arbitration."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.tree import MAX_NODES, TokenTree


def merge(trees: Sequence[TokenTree], max_nodes: int) -> TokenTree:
    """The ``max_nodes`` best draft nodes of all ``trees``, which share their pending token.

    A node proposed twice keeps the better score and the first proposer's name.

    Raises:
        ValueError: the trees have different roots.
    """
    if any(tree.tokens[0] != trees[0].tokens[0] for tree in trees):
        raise ValueError("trees: must share their pending token")
    proposals = [tree.best(max_nodes) for tree in trees if len(tree) > 1]
    if not proposals:
        return TokenTree(trees[0].tokens[0])
    if len(proposals) == 1:
        return proposals[0]
    merged = TokenTree(trees[0].tokens[0])
    for tree in proposals:
        nodes = {0: 0}
        for node in range(1, len(tree)):
            parent = nodes.get(tree.parents[node])
            known = parent is not None and merged.child(parent, tree.tokens[node]) is not None
            if parent is None or (len(merged) >= MAX_NODES and not known):
                continue
            nodes[node] = merged.add(parent, tree.tokens[node], tree.scores[node], tree.sources[node])
    return merged.best(max_nodes)
