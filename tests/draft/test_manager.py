"""Drafters that misbehave: they cost speed, never anything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from draft.manager import MAX_FAULTS, PREFILL_PER_STALL, SUSPENSION_S, DrafterManager
from draft.protocol import DraftTask
from specdec.control.inputs import DraftWork, Match
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.core.types import SpeculationMode, SpeculationParams
from tests.draft.helpers import make_sequence, make_task
from tests.draft.scripted_drafter import Make, Scripted

VOCAB = 100


class Clock:
    """A clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def chain(*tokens: int, score: float = -1.0) -> Make:
    """Proposes these tokens one after the other."""

    def make(task: DraftTask) -> TokenTree:
        tree = TokenTree(task.sequence.tokens[-1])
        node = 0
        for depth, token in enumerate(tokens, 1):
            node = tree.add(node, token, depth * score, "s")
        return tree

    return make


def spoilt(spoil: Callable[[TokenTree], object]) -> Make:
    """A good chain of two, spoilt."""

    def make(task: DraftTask) -> TokenTree:
        tree = chain(5, 6)(task)
        spoil(tree)
        return tree

    return make


def wrong_root(task: DraftTask) -> TokenTree:
    return TokenTree(task.sequence.tokens[-1] + 1)


def no_tree(task: DraftTask) -> TokenTree:
    return "tree"  # type: ignore[return-value]


def nothing(task: DraftTask) -> TokenTree:
    return None  # type: ignore[return-value]


def set_item(values: list[Any], at: int, value: Any) -> None:
    values[at] = value


GARBAGE: dict[str, Make] = {
    "wrong root": wrong_root,
    "not a tree": no_tree,
    "None": nothing,
    "beyond the vocabulary": chain(10**6),
    "negative token": chain(-1),
    "token that is a word": spoilt(lambda t: set_item(t.tokens, 1, "a")),
    "cycle": spoilt(lambda t: set_item(t.parents, 1, 2)),
    "own parent": spoilt(lambda t: set_item(t.parents, 1, 1)),
    "two roots": spoilt(lambda t: set_item(t.parents, 1, -1)),
    "root with a parent": spoilt(lambda t: set_item(t.parents, 0, 0)),
    "root above certainty": spoilt(lambda t: set_item(t.scores, 0, 1.0)),
    "token missing": spoilt(lambda t: t.tokens.pop()),
    "score NaN": spoilt(lambda t: set_item(t.scores, 2, math.nan)),
    "score above 0": spoilt(lambda t: set_item(t.scores, 2, 0.5)),
    "score missing": spoilt(lambda t: t.scores.pop()),
    "score that is a word": spoilt(lambda t: set_item(t.scores, 1, "a")),
    "too many nodes": chain(*range(1, 9)),
}
SLIPS_THROUGH: dict[str, Make] = {
    "cell of no drafter": spoilt(lambda t: set_item(t.cells, 1, 10**9)),
    "cells missing": spoilt(lambda t: t.cells.clear()),
    "depths missing": spoilt(lambda t: t.depths.clear()),
    "sources missing": spoilt(lambda t: t.sources.clear()),
    "never reached, but counted": spoilt(lambda t: scored(t, -math.inf, -math.inf)),
    "likelier than its parent by far": spoilt(lambda t: scored(t, -1e4, -1.0)),
}
"""What the panel takes for sound, and breaks the step."""

HARMLESS: dict[str, Make] = {
    "depth wrong": spoilt(lambda t: set_item(t.depths, 2, 7)),
    "never reached": spoilt(lambda t: set_item(t.scores, 1, -math.inf)),
    "likelier than its parent": spoilt(lambda t: set_item(t.scores, 1, -3.0)),
    "token that is a fraction": spoilt(lambda t: set_item(t.tokens, 1, 5.5)),
    "certain": spoilt(lambda t: scored(t, 0.0, 0.0)),
}
"""What is no sound tree, but does no harm."""


def scored(tree: TokenTree, first: float, second: float) -> None:
    """Scores of a chain of two, in a cell of the first drafter. The first token is the one the target chooses."""
    tree.scores[1:], tree.cells[1:] = [first, second], [0, 0]


def begun(panel: DrafterManager, *prompts: Seq[int]) -> list[Sequence]:
    sequences = [make_sequence(list(prompt)) for prompt in prompts]
    for sequence in sequences:
        panel.begin(sequence)
    return sequences


def ask(panel: DrafterManager, name: str, *sequences: Sequence, pending: int = 0) -> DraftWork:
    """DraftRequest for the sequences that may use the drafter."""
    tasks = [make_task(s, source=name) if panel.may_propose(name, s) else None for s in sequences]
    return panel.propose(name, tasks, pending)


def tokens(work: DraftWork) -> list[list[int] | None]:
    return [None if tree is None else tree.tokens for tree in work.trees]


@pytest.mark.parametrize("make", GARBAGE.values(), ids=GARBAGE)
def test_a_bad_tree_is_dropped_and_the_drafter_does_not_run_again(make: Make) -> None:
    bad, good = Scripted("bad", make), Scripted("good", chain(5, 6))
    panel = DrafterManager([bad, good], VOCAB)
    (sequence,) = begun(panel, [1, 2])
    for _ in range(3):
        assert tokens(ask(panel, "bad", sequence)) == [None]
        assert tokens(ask(panel, "good", sequence)) == [[2, 5, 6]]
    assert bad.calls.count("propose") == 1
    assert good.calls.count("propose") == 3


@pytest.mark.parametrize("make", SLIPS_THROUGH.values(), ids=SLIPS_THROUGH)
def test_bug_a_tree_that_fails_the_step_is_dropped(make: Make) -> None:
    panel = DrafterManager([Scripted("bad", make)], VOCAB)
    (sequence,) = begun(panel, [1, 2])
    assert tokens(ask(panel, "bad", sequence)) == [None]


@pytest.mark.parametrize("answer", [[], None, 7, [TokenTree(2)] * 2])
def test_a_wrong_number_of_trees_is_a_fault(answer: Any) -> None:
    bad = Scripted("bad", chain(1))
    bad.propose = lambda tasks: answer  # type: ignore[method-assign]
    panel = DrafterManager([bad], VOCAB)
    (sequence,) = begun(panel, [1, 2])
    assert tokens(ask(panel, "bad", sequence)) == [None]
    assert not panel.may_propose("bad", sequence)


@pytest.mark.parametrize("fault", ["raises", "one match too few", "no match but a length", "slow"])
def test_a_drafter_that_fails_to_match_is_dropped_for_its_sequences_only(fault: str) -> None:
    drafter, clock = Scripted("d", chain(5)), Clock()
    panel = DrafterManager([drafter], VOCAB, stall_ms=50.0, clock=clock)
    before, after = begun(panel, [1], [2])

    def match(sequences: Seq[Sequence]) -> list[Match]:
        clock.now += 0.1 if fault == "slow" else 0.01
        if fault == "raises":
            raise ValueError("no match")
        found = [5 if fault == "no match but a length" else Match.STRONG] * len(sequences)
        return found[fault == "one match too few" :]  # type: ignore[return-value]

    drafter.match = match  # type: ignore[method-assign]
    assert panel.match("d", [before]) == [Match.NONE]
    assert (panel.may_propose("d", before), panel.may_propose("d", after)) == (False, True)
    for sequence in begun(panel, [3], [4]):
        panel.match("d", [sequence])
    assert not panel.may_propose("d", after)  # suspended after three faults


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "rewind"])
def test_a_drafter_that_raises_is_dropped_for_its_sequence_only(method: str) -> None:
    drafter = Scripted("d", chain(5))
    panel = DrafterManager([drafter], VOCAB)
    (before,) = begun(panel, [1])
    drafter.raises = {method}
    sequence = make_sequence([2])
    panel.begin(sequence)
    ask(panel, "d", sequence)
    panel.observe(sequence, [3])
    panel.rewind(sequence)
    drafter.raises = set()
    assert not panel.may_propose("d", sequence)
    assert not panel.may_draft(sequence)
    assert tokens(ask(panel, "d", before, sequence)) == [[1, 5], None]
    seen = len(drafter.calls)
    panel.observe(sequence, [4])
    assert len(drafter.calls) == seen


def test_an_invalid_pending_prefill_is_a_fault() -> None:
    for owes, raises in (
        (0, {"pending_prefill"}),
        (0, {"tail_prefill"}),
        ("many", set()),
        (math.nan, set()),
        (None, set()),
        (math.inf, set()),
    ):
        drafter = Scripted("d", chain(5), model_based=True)
        drafter.owes, drafter.raises = owes, raises
        panel = DrafterManager([drafter], VOCAB)
        (sequence,) = begun(panel, [1])
        assert panel.pending_prefill("d", sequence) == (0, 0)
        assert not panel.may_propose("d", sequence)


@pytest.mark.parametrize(
    ("owes", "tail", "expected"),
    [(7, None, (7, 7)), (-3, None, (0, 0)), (2.5, None, (2, 2)), (7, 3, (7, 3)), (7, 9, (7, 7)), (7, -1, (7, 0))],
)
def test_a_pending_prefill_is_returned(owes: float, tail: int | None, expected: tuple[int, int]) -> None:
    drafter = Scripted("d", chain(5), model_based=True)
    drafter.owes, drafter.owes_tail = owes, tail
    panel = DrafterManager([drafter], VOCAB)
    (sequence,) = begun(panel, [1])
    assert panel.pending_prefill("d", sequence) == expected
    assert panel.may_propose("d", sequence)


def test_a_bad_tree_keeps_the_drafter_of_other_sequences() -> None:
    panel = DrafterManager([Scripted("picky", lambda t: chain(VOCAB if t.sequence.tokens[-1] == 3 else 5)(t))], VOCAB)
    three, four = begun(panel, [3], [4])
    assert tokens(ask(panel, "picky", three, four)) == [None, [4, 5]]
    assert tokens(ask(panel, "picky", three, four)) == [None, [4, 5]]
    assert (panel.may_propose("picky", three), panel.may_propose("picky", four)) == (False, True)


def test_a_drafter_gets_only_its_own_sequences() -> None:
    drafter = Scripted("d", chain(5))
    panel = DrafterManager([drafter], VOCAB)
    (sequence,) = begun(panel, [1])
    assert tokens(panel.propose("d", [None, make_task(sequence), None])) == [None, [1, 5], None]
    assert tokens(panel.propose("d", [None, None])) == [None, None]
    assert drafter.calls.count("propose") == 1


def test_work_counts_levels_and_time() -> None:
    clock = Clock()

    def slow(task: DraftTask) -> TokenTree:
        clock.now += 0.25
        return chain(5, 6, 7)(task)

    panel = DrafterManager([Scripted("d", slow)], VOCAB, clock=clock)
    one, other = begun(panel, [1], [2])
    work = ask(panel, "d", one, other)
    assert (work.levels, work.ms) == (3, 500.0)


def test_an_empty_tree_counts_as_a_level() -> None:
    panel = DrafterManager([Scripted("d", chain())], VOCAB)
    (sequence,) = begun(panel, [1])
    assert repr(ask(panel, "d", sequence).levels) == "1"  # not True, which a trace would show as it is


def stalling(clock: Clock, seconds: float) -> Make:
    def make(task: DraftTask) -> TokenTree:
        clock.now += seconds
        return chain(5)(task)

    return make


@pytest.mark.parametrize(
    ("seconds", "pending", "trusted"),
    [(0.9, 0, True), (1.1, 0, False), (1.9, PREFILL_PER_STALL, True), (2.1, PREFILL_PER_STALL, False)],
)
def test_a_stalled_drafter_is_dropped_after_its_prefill_allowance(seconds: float, pending: int, trusted: bool) -> None:
    clock = Clock()
    panel = DrafterManager([Scripted("d", stalling(clock, seconds))], VOCAB, 1000.0, clock)
    (sequence,) = begun(panel, [1])
    assert tokens(ask(panel, "d", sequence, pending=pending)) == [[1, 5]]  # it is here now
    assert panel.may_propose("d", sequence) is trusted


def test_three_consecutive_faults_suspend_a_drafter_for_all_requests_temporarily() -> None:
    clock = Clock()
    drafter = Scripted("d", chain(5))
    panel = DrafterManager([drafter, Scripted("other", chain(6))], VOCAB, clock=clock)
    good, *others = begun(panel, [1], *[[n] for n in range(2, 2 + MAX_FAULTS)])
    drafter.raises = {"propose"}
    for n, sequence in enumerate(others):
        assert panel.may_propose("d", good) is (n < MAX_FAULTS)
        ask(panel, "d", sequence)
    drafter.raises = set()
    assert not panel.may_propose("d", good)
    assert panel.may_propose("other", good)
    (late,) = begun(panel, [9])
    clock.now += SUSPENSION_S - 1
    assert not panel.may_propose("d", late)
    clock.now += 1
    assert tokens(ask(panel, "d", good, late, *others)) == [[1, 5], [9, 5], *[None] * MAX_FAULTS]


def test_a_successful_call_in_between_resets_the_faults() -> None:
    drafter = Scripted("d", chain(5))
    panel = DrafterManager([drafter], VOCAB)
    good, *others = begun(panel, [1], *[[n] for n in range(2, 10)])
    for sequence in others:
        drafter.raises = {"propose"}
        ask(panel, "d", sequence)
        drafter.raises = set()
        assert tokens(ask(panel, "d", good)) == [[1, 5]]


def test_bug_one_call_is_one_fault() -> None:
    panel = DrafterManager([Scripted("d", lambda t: chain(VOCAB if t.sequence.tokens[-1] > 1 else 5)(t))], VOCAB)
    good, *others = begun(panel, [1], *[[n] for n in range(2, 2 + MAX_FAULTS)])
    ask(panel, "d", good, *others)
    assert panel.may_propose("d", good)


def test_a_suspended_drafter_still_gets_updates_of_its_sequences() -> None:
    drafter = Scripted("d", chain(5))
    panel = DrafterManager([drafter], VOCAB)
    good, *others = begun(panel, [1], *[[n] for n in range(2, 2 + MAX_FAULTS)])
    drafter.raises = {"propose"}
    for sequence in others:
        ask(panel, "d", sequence)
    drafter.calls.clear()
    panel.observe(good, [2])
    panel.rewind(good)
    assert drafter.calls == ["observe", "rewind"]


def test_only_allowed_drafters_get_a_sequence() -> None:
    a, b = Scripted("a", chain(1)), Scripted("b", chain(2))
    panel = DrafterManager([a, b], VOCAB)
    sequence = make_sequence([0], speculation=SpeculationParams(drafters=("b",)))
    panel.begin(sequence)
    assert (panel.may_propose("a", sequence), panel.may_propose("b", sequence)) == (False, True)
    panel.observe(sequence, [1])
    panel.end(sequence)
    assert a.calls == []
    assert b.calls == ["begin", "observe", "end"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_drafter_that_declines_a_sequence_gets_no_updates(fails: bool) -> None:
    """Neither does one that raises, and it affects neither the other drafter nor the request."""
    a, b = Scripted("a", chain(1)), Scripted("b", chain(2))
    requested: list[Sequence] = []

    def serves(sequence: Sequence) -> bool:
        requested.append(sequence)
        if fails:
            raise RuntimeError("serves")
        return False

    a.serves = serves  # type: ignore[attr-defined]
    panel = DrafterManager([a, b], VOCAB)
    (sequence,) = begun(panel, [1])
    assert requested == [sequence]
    assert (panel.may_propose("a", sequence), panel.may_propose("b", sequence)) == (False, True)
    assert tokens(ask(panel, "b", sequence)) == [[1, 2]]
    panel.observe(sequence, [1])
    panel.end(sequence)
    assert a.calls == []
    assert b.calls == ["begin", "propose", "observe", "end"]


def test_without_allowed_drafters_nothing_is_drafted() -> None:
    panel = DrafterManager([Scripted("a", chain(1))], VOCAB)
    sequence = make_sequence([0], speculation=SpeculationParams(SpeculationMode.OFF))
    panel.begin(sequence)
    assert not panel.may_draft(sequence)
    panel.end(sequence)


def test_a_failed_drafter_is_notified_of_the_end() -> None:
    bad = Scripted("bad", chain(5))
    bad.raises = {"propose", "end"}
    panel = DrafterManager([bad], VOCAB)
    (sequence,) = begun(panel, [1])
    assert panel.may_draft(sequence)
    ask(panel, "bad", sequence)
    assert not panel.may_draft(sequence)
    panel.end(sequence)
    assert bad.calls.count("end") == 1
    assert not panel.may_propose("bad", sequence)


def test_a_sequence_that_never_started_may_end() -> None:
    drafter = Scripted("d", chain(5))
    DrafterManager([drafter], VOCAB).end(make_sequence([1]))
    assert drafter.calls == []


def test_which_drafters_run_a_model() -> None:
    panel = DrafterManager([Scripted("a", chain()), Scripted("b", chain(), model_based=True)], VOCAB)
    assert (panel.lookups, panel.models) == (["a"], ["b"])


def test_a_tree_of_the_maximum_size_is_valid() -> None:
    panel = DrafterManager([Scripted("d", chain(*[7] * (MAX_NODES - 1), score=-0.01))], VOCAB)
    (sequence,) = begun(panel, [1])
    (tree,) = panel.propose("d", [make_task(sequence, nodes=MAX_NODES - 1, depth=63)]).trees
    assert tree is not None
    assert len(tree) == MAX_NODES
