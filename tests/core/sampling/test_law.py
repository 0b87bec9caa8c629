"""Whole sequences follow the right distribution, and their tokens do not depend on the tree."""

from __future__ import annotations

import pytest

from tests.core.sampling.checks import PROBLEMS, follows_the_law, law_p_value, proposers, trees_change_nothing
from tests.core.sampling.decoding import (
    Implementation,
    Node,
    choose,
    coupled_children,
    decode_by_trees,
    decode_plainly,
    start,
)
from tests.core.sampling.natives import native_sampling
from verify_kernels.reference.sampling import ReferenceSampling

FEW, MANY = 5_000, 20_000  # 4,000 seeds suffice to reject the broken samplers of test_mutants.py
SEEDS = pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])


@SEEDS
@pytest.mark.parametrize("name", PROBLEMS)
def test_sequences_follow_the_exact_distribution(name: str, seeds: int) -> None:
    assert follows_the_law(Implementation(native_sampling()), PROBLEMS[name], range(seeds))


@pytest.mark.parametrize("name", PROBLEMS)
def test_trees_change_no_token(name: str) -> None:
    assert trees_change_nothing(Implementation(native_sampling()), PROBLEMS[name], range(500))


@SEEDS
@pytest.mark.parametrize("drafter", ["random", "coupled"])
def test_sequences_through_trees_follow_the_exact_distribution(drafter: str, seeds: int) -> None:
    """Implied by the two above; checked end to end all the same, on the problem with every feature."""
    problem = PROBLEMS["everything"]
    propose, implementation = proposers(problem)[drafter], Implementation(native_sampling())
    outputs = decode_by_trees(problem, range(50_000, 50_000 + seeds), implementation, propose, depth=2)
    assert law_p_value(problem, outputs) > 1e-4


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_decodes_the_same_sequences(name: str) -> None:
    native, reference = Implementation(native_sampling()), Implementation(ReferenceSampling())
    seeds = range(250)
    assert decode_plainly(PROBLEMS[name], seeds, native) == decode_plainly(PROBLEMS[name], seeds, reference)


def test_coupled_children_contain_the_choice_more_often_than_independent_ones_could() -> None:
    """With q = p the best child *is* the choice: every drafted token is accepted, none is wasted."""
    problem = PROBLEMS["everything"]
    implementation = Implementation(native_sampling())
    decodings = start(problem, range(500), implementation)
    nodes = [Node(i, ()) for i in range(500)]
    choose(decodings, nodes, implementation)
    proposed = coupled_children(problem.model, 1)(decodings, nodes, implementation)
    assert [tokens[0] for tokens in proposed] == [node.choice for node in nodes]
