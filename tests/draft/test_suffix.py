"""The suffix automaton against brute force, and what the suffix drafter proposes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from draft.suffix import SuffixDrafter
from draft.suffix_automaton import COUNT_WALK, SuffixAutomaton
from tests.draft.helpers import make_sequence, make_task

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def occurrences(text: list[int], part: list[int]) -> list[int]:
    """End positions of ``part`` in ``text``."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int | None:
    state: int | None = 0
    for token in part:
        state = automaton.edges[state].get(token) if state is not None else None
    return state


@given(texts, texts)
def test_accepts_exactly_the_substrings(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    for part in (other, other[:2], text[1:4], text[-3:]):
        assert (state_of(automaton, part) is not None) == bool(occurrences(text, part) or not part)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=COUNT_WALK - 1))
def test_counts_are_exact_for_short_texts(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state = state_of(automaton, text[start:end])
            assert state is not None
            assert automaton.counts[state] == len(occurrences(text, text[start:end]))


@given(texts)
def test_match_is_the_longest_suffix_seen_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    longest = 0
    for size in range(1, len(text)):
        if len(occurrences(text, text[-size:])) > 1:
            longest = size
    state = automaton.match(1)
    assert automaton.lengths[state] == longest
    followers = Counter(text[e] for e in occurrences(text, text[len(text) - longest :]) if longest and e < len(text))
    assert set(automaton.edges[state]) >= set(followers)


def test_continues_a_repetition() -> None:
    drafter = SuffixDrafter()
    sequence = make_sequence([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    drafter.begin(sequence)
    (tree,) = drafter.propose([make_task(sequence, nodes=3)])
    assert tree.tokens == [3, 4, 5, 6]
    assert tree.parents == [-1, 0, 1, 2]


def test_branches_by_counts_best_first() -> None:
    drafter = SuffixDrafter()
    sequence = make_sequence([1, 2, 7, 0, 1, 2, 8, 0, 1, 2, 7, 5, 1, 2])
    drafter.begin(sequence)
    (tree,) = drafter.propose([make_task(sequence, nodes=2, depth=1)])
    assert tree.tokens == [2, 7, 8]
    assert tree.parents == [-1, 0, 0]
    assert tree.scores[1] > tree.scores[2]


def test_obeys_limits_and_forgets() -> None:
    drafter = SuffixDrafter()
    sequence = make_sequence([1, 2, 3] * 30)
    drafter.begin(sequence)
    for nodes, depth in ((0, 7), (1, 7), (5, 2), (7, 0)):
        (tree,) = drafter.propose([make_task(sequence, nodes, depth)])
        assert len(tree) - 1 <= nodes
        assert max(tree.depths) <= depth
    drafter.end(sequence)
    assert not drafter._texts


def test_follows_committed_tokens() -> None:
    drafter = SuffixDrafter()
    sequence = make_sequence([1, 2, 3, 4])
    drafter.begin(sequence)
    assert len(drafter.propose([make_task(sequence)])[0]) == 1
    sequence.tokens += [9, 1, 2]
    (tree,) = drafter.propose([make_task(sequence, nodes=2)])
    assert tree.tokens == [2, 3, 4]
