"""The token tree: trie behaviour, order, and what `best` keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.tree import MAX_NODES, TokenTree, check_tree


def build(moves: list[tuple[int, int, float]]) -> TokenTree:
    tree = TokenTree(7)
    for parent, token, score in moves:
        if len(tree) < MAX_NODES:
            tree.add(parent % len(tree), token, score, "t")
    return tree


moves = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 4), st.floats(-20, 0, allow_nan=False)), min_size=0, max_size=80
)


@given(moves)
def test_children_are_distinct_and_found(made: list[tuple[int, int, float]]) -> None:
    tree = build(made)
    check_tree(tree.tokens, tree.parents, 10)
    edges = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
    assert len(edges) == len(set(edges))
    for node in range(1, len(tree)):
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
        assert tree.depths[node] == len(tree.path(node))
        assert tree.path(node)[-1] == node


@given(moves, st.integers(0, 20))
def test_best_keeps_the_top_nodes_in_depth_first_order(made: list[tuple[int, int, float]], limit: int) -> None:
    tree = build(made)
    best = tree.best(limit)
    assert len(best) == min(limit, len(tree) - 1) + 1
    reached = [min(tree.scores[n] for n in tree.path(node)) for node in range(1, len(tree))]
    assert sorted(best.scores[1:]) == sorted(sorted(reached, reverse=True)[: len(best) - 1])
    paths = {tuple(tree.path_tokens(n)) for n in range(len(tree))}
    for node in range(1, len(best)):
        assert tuple(best.path_tokens(node)) in paths
        # depth first: a node comes right after its parent or after the subtree of an elder sibling
        parent = best.parents[node]
        assert parent == node - 1 or node - 1 not in best.path(parent)
    first = next((n for n in range(1, len(best)) if best.parents[n] != n - 1), len(best))
    assert best.depths[:first] == list(range(first))


def test_adding_twice_merges_and_keeps_the_better_score() -> None:
    tree = TokenTree(1)
    node = tree.add(0, 5, -2.0, "a")
    assert tree.add(0, 5, -1.0, "b") == node
    assert tree.add(0, 5, -3.0, "b") == node
    assert (tree.scores[node], tree.sources[node], len(tree)) == (-1.0, ("a",), 2)


def test_bounds() -> None:
    tree = TokenTree(1)
    with pytest.raises(ValueError, match="parent"):
        tree.add(1, 0, 0.0, "")
    for i in range(MAX_NODES - 1):
        tree.add(0, i, 0.0, "")
    with pytest.raises(ValueError, match="at most"):
        tree.add(0, 999, 0.0, "")
    assert tree.add(0, 3, 0.0, "") == 4  # already there: no room needed


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1], "parents"),
        ([1, 2], [-1, 1], "node 1"),
        ([1, 2], [-1, -1], "node 1"),
        ([1, 9], [-1, 0], "holds 9"),
    ],
)
def test_check_tree_refuses(tokens: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tree(tokens, parents, 9)
