"""The merge: one trie of all proposals, the best chance of each node, shared credit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.policies.which_nodes import merge
from specdec.core.tree import MAX_NODES, TokenTree, check_tree
from tests.control.helpers import chain, make_tree, paths, trees

forests = st.tuples(trees(most=10, source="a"), trees(most=10, source="b"), trees(most=10, source="c"))


def chances(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Chance of each path to be reached."""
    return {tuple(tree.path_tokens(node)): math.exp(tree.scores[node]) for node in range(1, len(tree))}


def by_path(tree: TokenTree) -> dict[tuple[int, ...], tuple[str, ...]]:
    return {tuple(tree.path_tokens(node)): tree.sources[node] for node in range(1, len(tree))}


@given(forests)
def test_all_proposals_are_merged_with_credit_for_each(forest: tuple[TokenTree, ...]) -> None:
    merged = merge(forest)
    check_tree(merged, 10, 0)
    assert paths(merged) == set().union(*map(paths, forest))
    for path, sources in by_path(merged).items():
        assert sorted(sources) == [name for name, tree in zip("abc", forest, strict=True) if path in paths(tree)]


@given(forests)
def test_no_node_is_likelier_than_its_parent(forest: tuple[TokenTree, ...]) -> None:
    if sum(len(tree) > 1 for tree in forest) < 2:
        return  # a lone proposal is the result
    merged = merge(forest)
    assert all(merged.scores[node] <= merged.scores[merged.parents[node]] for node in range(1, len(merged)))


def test_a_lone_proposal_is_the_result() -> None:
    tree = make_tree([(0, 1, 0.6), (0, 2, 0.6)])
    assert merge([TokenTree(0), tree]) is tree


def test_a_node_of_two_proposers_has_the_better_chance() -> None:
    merged = chances(merge([chain([0.6], [1], source="a"), chain([0.5], [1], source="b")]))
    assert merged[1,] == pytest.approx(0.6)


def test_chances_under_a_node_of_two_proposers_are_conditional() -> None:
    one, other = chain([0.2, 0.8], [1, 2], source="a"), chain([0.9, 0.1], [1, 2], source="b")
    merged = chances(merge([one, other]))
    assert merged[1, 2] == pytest.approx(0.9 * 0.8)


def test_siblings_of_two_drafters_keep_their_chances() -> None:
    merged = chances(merge([chain([0.9], [1], source="a"), chain([0.6], [2], source="b")]))
    assert (merged[1,], merged[2,]) == (pytest.approx(0.9), pytest.approx(0.6))


def test_trees_of_several_full_drafters_are_merged_whole() -> None:
    wide = [make_tree([(0, 100 * i + t, 0.01) for t in range(MAX_NODES - 1)], source=str(i)) for i in range(3)]
    merged = merge([*wide, chain([0.5], [7], source="late")])
    assert len(merged) == 1 + 3 * (MAX_NODES - 1)
    assert by_path(merged)[7,] == ("0", "late")


def test_an_impossible_node_is_accepted() -> None:
    tree = TokenTree(0)
    tree.add(tree.add(0, 1, -math.inf, "a"), 2, -math.inf, "a")
    merged = merge([tree, chain([0.5], [3], source="b")])
    assert all(math.isfinite(score) and score <= 0 for score in merged.scores)


def test_proposals_are_not_modified() -> None:
    one, other = chain([0.6], [1], source="a"), chain([0.5], [1], source="b")
    before = [list(one.scores), list(one.sources), list(other.scores)]
    merge([one, other])
    assert [one.scores, one.sources, other.scores] == before


def test_without_proposals_decode_is_plain() -> None:
    assert merge([TokenTree(5), TokenTree(5)]).tokens == [5]
