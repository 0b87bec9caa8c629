"""The token tree: trie behaviour, order, and what `subtree` keeps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.tree import TokenTree, check_tree


def build(moves: list[tuple[int, int, float]]) -> TokenTree:
    tree = TokenTree(7)
    for parent, token, chance in moves:
        tree.add(parent % len(tree), token, tree.scores[parent % len(tree)] + chance, "t")
    return tree


def described(tree: TokenTree, nodes: Iterable[int]) -> dict[tuple[int, ...], tuple[object, ...]]:
    """By path, what a subtree keeps of a node."""
    return {tuple(tree.path_tokens(n)): (tree.scores[n], tree.sources[n], tree.cells[n], tree.depths[n]) for n in nodes}


moves = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 4), st.floats(-20, 0, allow_nan=False)), min_size=0, max_size=80
)


@given(moves)
def test_children_are_distinct_and_found(made: list[tuple[int, int, float]]) -> None:
    tree = build(made)
    check_tree(tree, 10, 0)
    edges = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
    assert len(edges) == len(set(edges))
    for node in range(1, len(tree)):
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
        assert tree.depths[node] == len(tree.path(node))
        assert tree.path(node)[-1] == node


@given(moves, st.data())
def test_a_subtree_keeps_its_nodes_in_depth_first_order(
    made: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    tree = build(made)
    kept: list[int] = []
    for node in data.draw(st.permutations(range(1, len(tree)))):
        if tree.parents[node] == 0 or tree.parents[node] in kept:
            kept.append(node)
    out = tree.subtree(kept)
    assert described(out, range(1, len(out))) == described(tree, kept)
    for node in range(2, len(out)):
        parent = out.parents[node]
        assert parent == node - 1 or node - 1 not in out.path(parent)
    if kept:
        assert out.path_tokens(1) == tree.path_tokens(kept[0])  # the best comes first


def test_adding_twice_merges_keeps_the_better_score_with_its_cell_and_credits_both() -> None:
    tree = TokenTree(1)
    node = tree.add(0, 5, -2.0, "a", 11)
    assert tree.add(0, 5, -1.0, "b", 12) == node
    assert tree.add(0, 5, -3.0, ("b", "c"), 13) == node
    assert tree.add(0, 5, -1.0, "a", 14) == node
    assert (tree.scores[node], tree.cells[node], len(tree)) == (-1.0, 12, 2)
    assert tree.sources[node] == ("a", "b", "c")


def test_the_root_has_no_drafter() -> None:
    tree = TokenTree(9)
    assert (tree.tokens, tree.parents, tree.depths, tree.scores, tree.sources, tree.cells) == (
        [9], [-1], [0], [0.0], [()], [-1]
    )  # fmt: skip
    assert tree.path(0) == []


def test_the_same_token_under_another_parent_is_another_node() -> None:
    tree = TokenTree(1)
    first = tree.add(0, 5, -1.0, "a")
    second = tree.add(first, 5, -2.0, "a")
    assert first != second
    assert tree.child(0, 5) == first
    assert tree.child(first, 5) == second
    assert tree.child(second, 5) is None


def test_a_node_needs_a_parent() -> None:
    with pytest.raises(ValueError, match="parent"):
        TokenTree(1).add(1, 0, 0.0, "")
