"""The budget: the best of all sets of nodes that are trees, objectives first, caps kept."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.inputs import SequenceInputs
from specdec.control.policies.which_nodes import choose
from specdec.core.tree import MAX_NODES, TokenTree
from tests.control.helpers import chain, make_one, make_tree, trees


@st.composite
def curves(draw: st.DrawFn, rows: int = 40) -> list[float]:
    """Milliseconds by rows: rising, convex or not."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0]), min_size=rows, max_size=rows))
    return [0.0, *itertools.accumulate(steps, initial=draw(st.sampled_from([0.5, 5.0, 20.0])))][: rows + 1]


def value(
    n: int, kept: list[list[int]], forest: list[TokenTree], curve: list[float], rows: int, draft_ms: float
) -> float:
    """Expected tokens per millisecond of verifying these nodes."""
    chances = [math.exp(tree.scores[node]) for tree, nodes in zip(forest, kept, strict=True) for node in nodes]
    return (n + sum(chances)) / (draft_ms + float(curve[rows + len(chances)]))


def subtrees(tree: TokenTree, room: int) -> list[list[int]]:
    """All sets of at most ``room`` draft nodes that hold the parent of each."""
    nodes = range(1, len(tree))
    return [
        list(chosen)
        for count in range(min(room, len(tree) - 1) + 1)
        for chosen in itertools.combinations(nodes, count)
        if all(tree.parents[node] in (0, *chosen) for node in chosen)
    ]


def is_tree(tree: TokenTree, kept: list[int]) -> bool:
    seen = {0}
    for node in kept:
        if tree.parents[node] not in seen or node in seen:
            return False
        seen.add(node)
    return True


small_forests = st.lists(trees(most=5), min_size=1, max_size=3)


@given(small_forests, curves(), st.sampled_from([0.0, 0.1, 5.0]), st.integers(0, 4))
def test_no_set_of_trees_has_a_higher_goodput(
    forest: list[TokenTree], curve: list[float], draft_ms: float, prefill_rows: int
) -> None:
    n = len(forest)
    fixed = n + prefill_rows
    choice = choose([make_one(i) for i in range(n)], forest, curve[fixed:], draft_ms)
    best = max(
        value(n, list(kept), forest, curve, fixed, draft_ms)
        for kept in itertools.product(*(subtrees(tree, 63) for tree in forest))
    )
    assert value(n, choice.kept, forest, curve, fixed, draft_ms) == pytest.approx(best)
    assert choice.budget == sum(map(len, choice.kept))
    assert choice.candidates == sum(len(tree) - 1 for tree in forest)
    assert all(is_tree(tree, kept) for tree, kept in zip(forest, choice.kept, strict=True))


def test_bug_no_set_within_the_caps_has_a_higher_goodput() -> None:
    """Two nodes of the first sequence may not be verified, but make a tier of four rows look worth its price."""
    forest = [chain([0.9, 0.9, 0.9]), chain([0.3])]
    sequences = [make_one(1, nodes=1), make_one(2)]
    curve = [0.0, 10, 10, 11, 15, 15, 15, 40, 40, 40]
    choice = choose(sequences, forest, curve[2:], 0.0)
    best = max(
        value(2, list(kept), forest, curve, 2, 0.0)
        for kept in itertools.product(*(subtrees(tree, one.nodes) for tree, one in zip(forest, sequences, strict=True)))
    )
    expected = sum(math.exp(tree.scores[node]) for tree, kept in zip(forest, choice.kept, strict=True) for node in kept)
    assert choice.predicted_tokens == pytest.approx(2 + expected)
    assert value(2, choice.kept, forest, curve, 2, 0.0) == pytest.approx(best)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[SequenceInputs], list[TokenTree]]:
    """Turns of all kinds with their trees."""
    forest = draw(st.lists(trees(most=12), min_size=1, max_size=5))
    sequences = [
        make_one(
            i,
            nodes=draw(st.integers(0, 14)),
            forced=draw(st.booleans()),
            due=draw(st.sampled_from([0.0, 0.5, 1.4, 9.0])),
        )
        for i in range(len(forest))
    ]
    return sequences, forest


@given(crowds(), curves(), st.floats(0, 10), st.integers(0, 60))
def test_trees_are_valid_within_the_caps_and_deterministic(
    crowd: tuple[list[SequenceInputs], list[TokenTree]], curve: list[float], draft_ms: float, prefill_rows: int
) -> None:
    sequences, forest = crowd
    fixed = min(len(sequences) + prefill_rows, len(curve) - 1)
    choice = choose(sequences, forest, curve[fixed:], draft_ms)
    for one, tree, kept in zip(sequences, forest, choice.kept, strict=True):
        assert len(kept) <= one.nodes
        assert is_tree(tree, kept)
        if one.forced:
            assert len(kept) == min(one.nodes, len(tree) - 1)
    again = choose(sequences, forest, curve[fixed:], draft_ms)
    assert (again.kept, again.budget) == (choice.kept, choice.budget)
    assert choice.budget == sum(map(len, choice.kept))


STEEP = [10.0 * rows for rows in range(40)]
"""Every row costs as much as the first: no node pays."""


def test_nodes_that_do_not_pay_are_dropped() -> None:
    choice = choose([make_one()], [chain([0.9, 0.9])], STEEP[1:], 0.0)
    assert (choice.kept, choice.budget, choice.predicted_tokens) == ([[]], 0, 1.0)


def test_a_forced_turn_keeps_all_nodes_and_the_others_are_still_selected() -> None:
    choice = choose([make_one(1), make_one(2, forced=True)], [chain([0.3]), chain([0.1, 0.1])], STEEP[2:], 0.0)
    assert choice.kept == [[], [1, 2]]


def test_a_lagging_turn_gets_exactly_the_nodes_it_needs() -> None:
    """Other steps earn two tokens in a millisecond, so without an objective no node is worth its half millisecond."""
    tree, curve = chain([0.5, 0.5, 0.5]), [10 + rows / 2 for rows in range(40)]
    kept = {due: choose([make_one(due=due)], [tree], curve, 0.0, rate=2.0).kept for due in (1.0, 1.5, 1.6, 1.8, 5.0)}
    assert kept == {1.0: [[]], 1.5: [[1]], 1.6: [[1, 2]], 1.8: [[1, 2, 3]], 5.0: [[1, 2, 3]]}


def test_an_objective_out_of_reach_slows_nobody() -> None:
    tree = chain([0.9, 0.5, 0.5])
    assert choose([make_one(due=9.0)], [tree], STEEP[1:], 0.0).kept == [[]]
    curve = [10.0, 10.0, 12.0, 20.0, 40.0]  # two nodes make a step's tokens 1.96 times as fast
    assert choose([make_one(due=9.0)], [tree], curve, 0.0).kept == [[1, 2]]
    assert choose([make_one(forced=True)], [tree], curve, 0.0).kept == [[1, 2, 3]]


def test_a_lagging_turn_precedes_better_nodes_of_others() -> None:
    """Rows for one node only: the curve ends there."""
    curve = [0.0, 10, 10, 10.1]
    sequences, forest = [make_one(1), make_one(2, due=1.2)], [chain([0.9]), chain([0.3])]
    assert choose(sequences, forest, curve[2:], 0.0).kept == [[], [1]]
    sequences[1].due = 0.0
    assert choose(sequences, forest, curve[2:], 0.0).kept == [[1], []]


def test_time_already_spent_on_drafting_raises_the_value_of_rows() -> None:
    curve = [0.0, 10, 13, 16]
    tree = chain([0.28, 0.9])
    assert choose([make_one()], [tree], curve[1:], 0.0).kept == [[]]
    assert choose([make_one()], [tree], curve[1:], 10.0).kept == [[1, 2]]


def test_time_already_spent_values_no_row_above_other_steps() -> None:
    """As above; but other steps earn a token in 2 ms, so 0.3 tokens are not worth the millisecond that a row takes."""
    tree, curve = chain([0.9, 0.3]), [0.0, 1.0, 2.0, 3.0]
    assert choose([make_one()], [tree], curve[1:], 10.0).kept == [[1, 2]]
    assert choose([make_one()], [tree], curve[1:], 10.0, rate=0.5).kept == [[1]]
    assert choose([make_one()], [tree], curve[1:], 10.0, rate=0.2).kept == [[1, 2]]


def test_bug_a_prompt_in_the_batch_does_not_raise_the_value_of_tokens() -> None:
    """A row takes a millisecond, as a token does without drafts. With a prompt of 100 rows in the batch the step takes
    101 ms, and charging the prompt's time to the tokens would value each at as much."""
    tree, curve = make_tree([(0, 1, 0.4), (0, 2, 0.3)]), [float(rows) for rows in range(128)]
    assert choose([make_one()], [tree], curve[101:], 0.0).kept == [[1, 2]]
    assert choose([make_one()], [tree], curve[101:], 0.0, prompts_ms=100.0).kept == [[]]


def test_nodes_hardly_delay_a_first_token() -> None:
    """The forward that ends a prompt takes 500 ms and a row 4: two nodes stay below 2 %. Sequences whose nodes are
    forced or due, and those that have their first token, take all."""
    tree, curve, fixed = chain([0.9] * 5), [4.0 * rows for rows in range(140)], 125
    kept = {
        (first, forced, due): choose(
            [make_one(first=first, forced=forced, due=due)], [tree], curve[fixed:], 0.0, prompts_ms=460.0
        ).kept
        for first, forced, due in itertools.product((False, True), (False, True), (0.0, 6.0))
    }
    assert kept.pop((True, False, 0.0)) == [[1, 2]]
    assert all(nodes == [[1, 2, 3, 4, 5]] for nodes in kept.values())


def test_of_equal_probabilities_the_parent_is_first() -> None:
    curve = [0.0, 10, 10.1, 30, 50]
    for edges in ([(0, 1, 0.5), (1, 2, 1.0), (2, 3, 1.0)], [(0, 1, 0.5), (0, 2, 0.5), (1, 3, 1.0)]):
        assert choose([make_one()], [make_tree(edges)], curve[1:], 0.0).kept == [[1]]


def test_likely_nodes_displace_the_unlikely_ones_of_a_full_tree() -> None:
    tree = make_tree([*((0, 100 + t, 0.005) for t in range(MAX_NODES - 1)), (0, 1, 0.9), (MAX_NODES, 2, 0.9)])
    one = make_one(forced=True, nodes=MAX_NODES - 1)
    (kept,) = choose([one], [tree], [float(1 + rows) for rows in range(len(tree))], 0.0).kept
    assert len(kept) == MAX_NODES - 1
    assert kept[:2] == [MAX_NODES, MAX_NODES + 1]


def test_without_proposals_the_step_is_plain() -> None:
    choice = choose([make_one(1), make_one(2)], [TokenTree(1), TokenTree(2)], STEEP[2:], 5.0)
    assert (choice.kept, choice.predicted_tokens) == ([[], []], 2.0)
