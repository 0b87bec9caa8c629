"""Sequences and tasks for drafter tests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from typing import Any

from draft.protocol import Drafter, DraftTask
from specdec.core.sampling import SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Request, SamplingParams, StoppingParams
from tests.sequences import new_sequence


def make_sequence(tokens: Seq[int], *, seed: int = 1, index: int = 0, **fields: Any) -> Sequence:
    """A sequence of a request with this prompt; ``fields`` are further ones of the request."""
    return new_sequence(Request("r", tuple(tokens), **fields), index, seed)


def sampled_by(sequence: Sequence, sampling: SequenceSampling) -> Sequence:
    """``sequence`` with another sampling than its request's."""
    sequence.sampling = sampling
    return sequence


def make_task(
    sequence: Sequence, nodes: int = 7, depth: int = 7, width: int = 2, floor: float = -math.inf, source: str = "s"
) -> DraftTask:
    greedy = SequenceSampling(SamplingParams(temperature=0.0), StoppingParams(), 1, 1000, (), sequence.tokens)
    return DraftTask(sampled_by(sequence, greedy), nodes, depth, width, source=source, floor=floor)


def propose(drafter: Drafter, sequence: Sequence, nodes: int = 7, depth: int = 63, width: int = 3) -> TokenTree:
    """Return one sequence's tree, checked for the rules of every tree."""
    (match,) = drafter.match([sequence])
    (tree,) = drafter.propose([make_task(sequence, nodes, depth, width, source=drafter.name)])
    assert match or len(tree) == 1
    assert tree.tokens[0] == sequence.tokens[-1]
    assert len(tree) - 1 <= nodes
    assert max(tree.depths) <= depth
    assert min(tree.tokens) >= 0
    for node in range(1, len(tree)):
        assert tree.scores[node] <= tree.scores[tree.parents[node]]
        assert tree.sources[node] == (drafter.name,)
        assert sum(parent == tree.parents[node] for parent in tree.parents) <= width
    return tree


def accepted(tree: TokenTree, future: Seq[int]) -> int:
    """Count the draft tokens that a target that continues with ``future`` would accept."""
    node = count = 0
    for token in future:
        child = tree.child(node, token)
        if child is None:
            break
        node, count = child, count + 1
    return count


def replay(drafter: Drafter, sequence: Sequence, output: Seq[int], nodes: int = 15, width: int = 3) -> float:
    """Return the tokens per step of a verify loop whose target generates ``output``; the sequence ends with it."""
    drafter.begin(sequence)
    at = steps = 0
    while at < len(output):
        tree = propose(drafter, sequence, nodes, nodes, width)
        taken = min(accepted(tree, output[at:]) + 1, len(output) - at)
        new = output[at : at + taken]
        sequence.tokens += new
        drafter.observe(sequence, new)
        at, steps = at + taken, steps + 1
    drafter.end(sequence)
    return len(output) / steps


def code_like(count: int, seed: int) -> list[int]:
    """``count`` tokens with the grain of source code: some tokens everywhere, most of them rare, lines that repeat."""
    rng = random.Random(seed)
    lines = [[rng.choice((1, 2, 3, 4, rng.randrange(5, 900))) for _ in range(9)] for _ in range(40)]
    tokens: list[int] = []
    while len(tokens) < count:
        if rng.random() < 0.3:
            tokens += rng.choice(lines)
        else:
            tokens += [rng.choice((1, 2, 3, rng.randrange(5, 900), rng.randrange(5, 900))) for _ in range(9)]
        tokens.append(0)
    return tokens[:count]
