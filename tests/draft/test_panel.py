"""Drafters that misbehave: they cost speed, never anything else."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from draft.panel import DraftPanel
from draft.protocol import DraftTask
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from tests.draft.helpers import make_sequence, make_task

VOCAB = 100


class Scripted:
    """A drafter that answers with whatever a function makes of each task."""

    def __init__(self, name: str, make: Callable[[DraftTask], TokenTree]) -> None:
        self.name, self.make, self.calls, self.ended = name, make, 0, 0

    def begin(self, sequence: Sequence) -> None: ...

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None: ...

    def rewind(self, sequence: Sequence) -> None: ...

    def end(self, sequence: Sequence) -> None:
        self.ended += 1

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        self.calls += 1
        return [self.make(task) for task in tasks]


def chain(*tokens: int, score: float = -1.0) -> Callable[[DraftTask], TokenTree]:
    def make(task: DraftTask) -> TokenTree:
        tree = TokenTree(task.sequence.tokens[-1])
        node = 0
        for token in tokens:
            node = tree.add(node, token, score, "s")
        return tree

    return make


def broken(task: DraftTask) -> TokenTree:
    raise RuntimeError("boom")


def wrong_root(task: DraftTask) -> TokenTree:
    return TokenTree(task.sequence.tokens[-1] + 1)


def cycle(task: DraftTask) -> TokenTree:
    tree = chain(1, 2)(task)
    tree.parents[1] = 2
    return tree


@pytest.mark.parametrize("make", [broken, wrong_root, cycle, chain(VOCAB), chain(-1)])
def test_a_bad_drafter_is_dropped_for_its_sequence(make: Callable[[DraftTask], TokenTree]) -> None:
    bad, good = Scripted("bad", make), Scripted("good", chain(5, 6))
    panel = DraftPanel([bad, good], VOCAB)
    sequence = make_sequence([1, 2])
    panel.begin(sequence, None)
    for _ in range(3):
        (tree,) = panel.propose([make_task(sequence)])
        assert tree.tokens == [2, 5, 6]
    assert bad.calls == 1
    assert good.calls == 3


def test_a_bad_tree_leaves_other_sequences_their_drafter() -> None:
    picky = Scripted("picky", lambda task: broken_for_three(task))
    panel = DraftPanel([picky], VOCAB)
    three, four = make_sequence([3]), make_sequence([4])
    panel.begin(three, None)
    panel.begin(four, None)
    for _ in range(2):
        trees = panel.propose([make_task(three), make_task(four)])
        assert [t.tokens for t in trees] == [[3], [4, 5]]


def broken_for_three(task: DraftTask) -> TokenTree:
    return chain(VOCAB + 1)(task) if task.sequence.tokens[-1] == 3 else chain(5)(task)


def test_too_many_nodes_are_cut() -> None:
    panel = DraftPanel([Scripted("greedy", chain(*range(1, 40)))], VOCAB)
    sequence = make_sequence([0])
    panel.begin(sequence, None)
    (tree,) = panel.propose([make_task(sequence, nodes=4)])
    assert tree.tokens == [0, 1, 2, 3, 4]


def test_proposals_merge_into_one_trie() -> None:
    panel = DraftPanel([Scripted("a", chain(1, 2, score=-1.0)), Scripted("b", chain(1, 3, score=-0.5))], VOCAB)
    sequence = make_sequence([0])
    panel.begin(sequence, None)
    (tree,) = panel.propose([make_task(sequence, nodes=7)])
    assert sorted(map(tuple, (tree.path_tokens(n) for n in range(len(tree))))) == [(), (1,), (1, 2), (1, 3)]
    assert tree.tokens == [0, 1, 3, 2]  # the better child first


def test_only_allowed_drafters_are_asked() -> None:
    a, b = Scripted("a", chain(1)), Scripted("b", chain(2))
    panel = DraftPanel([a, b], VOCAB)
    sequence = make_sequence([0])
    panel.begin(sequence, ("b",))
    (tree,) = panel.propose([make_task(sequence)])
    assert tree.tokens == [0, 2]
    panel.end(sequence)
    assert (a.calls, a.ended, b.ended) == (0, 0, 1)


def test_a_drafter_that_failed_is_still_told_of_the_end() -> None:
    bad = Scripted("bad", broken)
    panel = DraftPanel([bad], VOCAB)
    sequence = make_sequence([1])
    panel.begin(sequence, None)
    assert panel.drafts_for(sequence)
    panel.propose([make_task(sequence)])
    assert not panel.drafts_for(sequence)
    panel.end(sequence)
    assert bad.ended == 1
