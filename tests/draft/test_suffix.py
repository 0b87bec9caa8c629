"""What the suffix drafter proposes, and from whose text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft import suffix
from draft.suffix import SuffixDrafter
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from tests.draft.helpers import accepted, code_like, make_sequence, make_task, propose, replay
from tests.draft.native_lookups import lookups

ALONE, SHARED = 0, 262_144  # tokens shared
texts = st.lists(st.integers(0, 4), min_size=1, max_size=80)


def drafter(shared_tokens: int = SHARED) -> SuffixDrafter:
    return SuffixDrafter(lookups(), shared_tokens)


def begun(of: SuffixDrafter, tokens: list[int], **fields: object) -> Sequence:
    sequence = make_sequence(tokens, **fields)
    of.begin(sequence)
    return sequence


def finish(of: SuffixDrafter, tokens: list[int], **fields: object) -> None:
    """A request with this text comes and goes, and its text is written."""
    of.end(begun(of, tokens, **fields))


def edges(tree: TokenTree) -> Iterator[tuple[int, int]]:
    return ((tree.tokens[tree.parents[node]], tree.tokens[node]) for node in range(1, len(tree)))


def pairs(*texts: list[int]) -> set[tuple[int, int]]:
    return {pair for text in texts for pair in pairwise(text)}


def test_a_repetition_is_continued() -> None:
    suffixes = drafter(ALONE)
    sequence = begun(suffixes, [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    tree = propose(suffixes, sequence, nodes=3)
    assert tree.tokens == [3, 4, 5, 6]
    assert tree.parents == [-1, 0, 1, 2]


def test_branches_by_counts_best_first() -> None:
    suffixes = drafter(ALONE)
    sequence = begun(suffixes, [1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 7, 5, 1, 2])
    tree = propose(suffixes, sequence, nodes=2, depth=1)
    assert tree.tokens == [2, 7, 8]
    assert tree.parents == [-1, 0, 0]
    assert tree.scores[1] > tree.scores[2]
    assert math.exp(tree.scores[1]) < 0.45  # a context that branched before branches again: by far less than two thirds


@given(texts, st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))
def test_every_proposed_step_was_seen(text: list[int], nodes: int, depth: int, width: int) -> None:
    prediction, earlier = text[::-1], [*text[5:], *text[:5]]
    suffixes = drafter(4 * len(text) + 100)
    finish(suffixes, earlier)
    sequence = begun(suffixes, text[:3], prediction_ids=tuple(prediction))
    for token in text[3:]:
        sequence.tokens.append(token)
        tree = propose(suffixes, sequence, nodes, depth, width)
        assert set(edges(tree)) <= pairs(prediction, earlier, sequence.tokens)


@given(texts)
def test_the_first_choice_follows_the_longest_suffix(text: list[int]) -> None:
    suffixes = drafter(ALONE)
    tree = propose(suffixes, begun(suffixes, text), nodes=5, depth=1, width=5)
    for size in range(len(text) - 1, 0, -1):
        followers = [text[i + size] for i in range(len(text) - size) if text[i : i + size] == text[-size:]]
        if followers:
            assert set(tree.tokens[1:]) == set(followers)
            assert followers.count(tree.tokens[1]) == max(followers.count(token) for token in followers)
            return
    assert len(tree) == 1


def test_a_long_match_has_a_higher_score() -> None:
    def first(text: list[int]) -> float:
        suffixes = drafter(ALONE)
        return propose(suffixes, begun(suffixes, text)).scores[1]

    line = list(range(10, 40))
    seen = [first([*line[-size:], 99, 5, *line[-size:]]) for size in (1, 2, 5, 10, 30)]
    assert seen == sorted(seen)
    assert math.exp(seen[0]) < 0.4
    assert math.exp(seen[-1]) > 0.9


def test_scores_increase_along_a_chain() -> None:
    suffixes = drafter(ALONE)
    line = list(range(10, 60))
    scores = propose(suffixes, begun(suffixes, [*line, 99, *line[:3]]), nodes=31).scores
    steps = [below - above for above, below in pairwise(scores)]
    assert steps == sorted(steps)
    assert steps[-1] > steps[0] / 4


def test_floors_are_obeyed() -> None:
    suffixes = drafter(ALONE)
    sequence = begun(suffixes, code_like(600, 1))
    everything = propose(suffixes, sequence, nodes=31)
    for floor in (-0.5, -2.0, -5.0):
        (tree,) = suffixes.propose([make_task(sequence, 31, 63, 3, floor)])
        assert all(score >= floor for score in tree.scores)
        assert len(tree) <= len(everything)
        above = sum(score >= floor for score in everything.scores)
        assert len(tree) >= above


def test_proposals_are_deterministic() -> None:
    trees = []
    for _ in range(2):
        suffixes = drafter()
        finish(suffixes, code_like(500, 2))
        trees.append(propose(suffixes, begun(suffixes, code_like(400, 2)), nodes=31))
    assert len(trees[0]) > 16
    assert (trees[0].tokens, trees[0].parents) == (trees[1].tokens, trees[1].parents)


def test_limits_are_obeyed_and_old_text_is_forgotten() -> None:
    suffixes = drafter()
    sequence = begun(suffixes, [1, 2, 3] * 30)
    for nodes, depth in ((0, 7), (1, 7), (5, 2), (7, 0)):
        propose(suffixes, sequence, nodes, depth)
    assert len(propose(suffixes, sequence, 63, 63)) == 64  # a short period goes round
    suffixes.end(sequence)
    assert not suffixes._readers
    suffixes.end(sequence)


def test_proposals_follow_committed_tokens() -> None:
    suffixes = drafter(ALONE)
    sequence = begun(suffixes, [1, 2, 3, 4])
    assert len(propose(suffixes, sequence)) == 1
    sequence.tokens += [9, 1, 2]
    assert propose(suffixes, sequence, nodes=2).tokens == [2, 3, 4]


def test_the_prediction_is_a_separate_text() -> None:
    suffixes = drafter(ALONE)
    sequence = begun(suffixes, [7, 7, 7, 50], prediction_ids=(20, 21, 22, 23, 24))
    assert len(propose(suffixes, sequence)) == 1
    sequence.tokens.append(20)
    assert propose(suffixes, sequence).tokens == [20, 21, 22, 23, 24]  # and nothing of the prompt behind its end


@pytest.mark.parametrize("session", ["", "editor"])
def test_the_text_of_an_earlier_request_is_continued(session: str) -> None:
    suffixes, text = drafter(), code_like(300, 3)
    finish(suffixes, text, session=session)
    if session:
        suffixes._texts._shared.clear()  # only the session's own text is left
    sequence = begun(suffixes, [5000, *text[100:120]], session=session)
    assert propose(suffixes, sequence, nodes=31, width=1).tokens == text[119:151]


def test_the_text_of_other_tenants_is_not() -> None:
    suffixes, text = drafter(), list(range(300))
    finish(suffixes, text, session="editor", cache_salt="ours")
    for fields in ({}, {"cache_salt": "theirs"}, {"session": "editor"}, {"cache_salt": "theirs", "session": "editor"}):
        sequence = begun(suffixes, [5000, *text[100:103]], **fields)
        assert len(propose(suffixes, sequence, nodes=31)) == 1
    sequence = begun(suffixes, [5000, *text[100:103]], cache_salt="ours")
    assert len(propose(suffixes, sequence, nodes=31)) > 1


def test_text_that_arrives_while_a_sequence_runs_is_used() -> None:
    suffixes, text = drafter(), code_like(300, 4)
    sequence = begun(suffixes, [5000, *text[100:120]])
    assert accepted(propose(suffixes, sequence, nodes=31), text[120:]) < 4
    finish(suffixes, text)
    assert accepted(propose(suffixes, sequence, nodes=31), text[120:]) > 20


def test_a_change_in_a_known_text_costs_only_itself() -> None:
    suffixes, text = drafter(), code_like(600, 5)
    changed = [*text[:200], 7001, 7002, *text[203:400], *text[420:]]
    fresh = replay(drafter(ALONE), make_sequence([9999]), changed)
    finish(suffixes, text)
    assert fresh < 3
    assert replay(suffixes, make_sequence([9999]), changed) > 8


def test_a_long_prompt_is_indexed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "INDEXED_PER_STEP", 10)  # of both sequences together
    suffixes = drafter(ALONE)
    long = begun(suffixes, [*range(100, 135), 100, 101], prediction_ids=tuple(range(200, 205)))
    short = begun(suffixes, [1, 2, 3, 1, 2])
    for step in range(6):
        matches = suffixes.match([short, long])
        assert matches == [Match.STRONG, Match.STRONG if step > 3 else Match.NONE]
        ours, theirs = suffixes.propose([make_task(short), make_task(long)])
        assert ours.tokens[:2] == [2, 3]  # the other sequences continue meanwhile
        assert (len(theirs) > 1) == (step > 3)
    assert theirs.tokens[1] == 102


@pytest.mark.parametrize(
    ("text", "match"), [([1, 2, 3], Match.NONE), ([1, 2, 1], Match.WEAK), ([1, 2, 3, 1, 2], Match.STRONG)]
)
def test_a_match_says_how_much_text_a_proposal_follows(text: list[int], match: Match) -> None:
    suffixes = drafter()
    finish(suffixes, [8, 2, 9])
    assert suffixes.match([begun(suffixes, text)]) == [match]
