"""The suffix automaton and the cursor in it, against brute force."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft import suffix_automaton
from draft.suffix_automaton import BREAK, COUNTED_SUFFIXES, MAX_FOLLOWERS, SuffixAutomaton, SuffixCursor

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


class Unsplit(SuffixAutomaton):
    """Forgets that shorter contexts need a state of their own."""

    __slots__ = ()

    def _split(self, state: int, token: int, target: int) -> int:
        return target


class Uncopied(SuffixAutomaton):
    """Splits, but loses the followers beyond the first."""

    __slots__ = ()

    def _split(self, state: int, token: int, target: int) -> int:
        clone = super()._split(state, token, target)
        self._branches.pop(clone, None)
        return clone


class Unclimbing(SuffixCursor):
    """Stays in its state when that is split."""

    __slots__ = ()

    def _climb(self) -> None: ...


def ends(text: list[int], part: list[int]) -> list[int]:
    """End positions of ``part`` in ``text``."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = 0
    for token in part:
        state = automaton.follow(state, token)
        if state < 0:
            return -1
    return state


def check_parts(automaton: SuffixAutomaton, text: list[int]) -> None:
    """Check that every substring of the text has a state with exactly what followed it, and that no other string has
    one."""
    parts = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, min(len(text), i + 7) + 1)}
    for key in parts:
        part = list(key)
        state = state_of(automaton, part)
        assert state >= 0, part
        followers = {text[end] for end in ends(text, part) if end < len(text)}
        assert {token for token, _ in automaton.followers(state)} == followers, part
        assert automaton.lengths[state] >= len(part)
        if part:
            assert len(part) > automaton.lengths[automaton.links[state]], part
            assert automaton.counts[state] == len(ends(text, part)) or len(text) > COUNTED_SUFFIXES
        sole = automaton.sole_follower(state)
        assert sole == next(iter(automaton.followers(state))) if len(followers) == 1 else sole[0] < 0
    assert all(state_of(automaton, [*part, 9]) < 0 for part in parts)


@given(texts)
def test_it_contains_exactly_the_substrings_of_its_text(text: list[int]) -> None:
    check_parts(SuffixAutomaton(text), text)


@pytest.mark.parametrize("wrong", [Unsplit, Uncopied])
def test_the_comparison_detects_a_wrong_split(wrong: type[SuffixAutomaton]) -> None:
    text = [0, 1, 2, 0, 1, 3, 2, 1, 0]  # [1] is split off [0 1], which two tokens have followed
    check_parts(SuffixAutomaton(text), text)
    with pytest.raises(AssertionError):
        check_parts(wrong(text), text)


@given(texts)
def test_the_last_link_is_the_longest_suffix_seen_before(text: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    longest = max(size for size in range(len(text)) if size == 0 or len(ends(text, text[-size:])) > 1)
    state = automaton.links[automaton.last]
    assert automaton.lengths[state] == longest
    if longest:
        followers = Counter(text[e] for e in ends(text, text[len(text) - longest :]) if e < len(text))
        assert {token for token, _ in automaton.followers(state)} == set(followers)


def test_counts_of_short_contexts_are_bounded_below() -> None:
    automaton = SuffixAutomaton([5] * 200)
    assert 1 <= automaton.counts[state_of(automaton, [5])] <= 200
    assert automaton.size == 200


def test_a_context_with_many_followers_costs_bounded_work() -> None:
    automaton = SuffixAutomaton([token for i in range(1000) for token in (0, 1 + i)])
    assert len(list(automaton.followers(state_of(automaton, [0])))) == MAX_FOLLOWERS


def check_cursor(cursor: SuffixCursor, text: list[int], tokens: list[int], window: int) -> None:
    own = next(size for size in range(len(tokens), -1, -1) if size == 0 or ends(text, tokens[-size:]))
    assert min(own, window) <= cursor.length <= own
    assert cursor.state == state_of(cursor.automaton, tokens[len(tokens) - cursor.length :])


# Events in turn: the text grows by these tokens, then the sequence by those.
turns = st.lists(
    st.tuples(st.lists(st.integers(-1, 2), max_size=12), st.lists(st.integers(0, 2), max_size=7)), max_size=8
)


@pytest.mark.parametrize("window", [1, 3, 32])
def test_a_cursor_stays_correct_while_its_text_grows(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_automaton, "WINDOW", window)

    @given(turns)
    def check(turns: list[tuple[list[int], list[int]]]) -> None:
        automaton, text, tokens = SuffixAutomaton(), list[int](), list[int]()
        cursor = SuffixCursor(automaton)
        for more_text, more_tokens in turns:
            automaton.extend(more_text)
            text += more_text
            tokens += more_tokens
            cursor.follow(tokens)
            check_cursor(cursor, text, tokens, window)

    check()


@given(texts, texts)
def test_a_cursor_in_a_static_text_is_exact(text: list[int], tokens: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    cursor = SuffixCursor(automaton)
    for count in range(1, len(tokens) + 1):
        cursor.follow(tokens[:count])
        check_cursor(cursor, text, tokens[:count], 1000)


def grow_under(kind: type[SuffixCursor]) -> None:
    """A cursor of ``kind`` in [1 2 3 5] after [2 3], when [4 2 3 5] comes in and splits its state."""
    automaton = SuffixAutomaton([1, 2, 3, 5])
    cursor = kind(automaton)
    for token in (2, 3):
        cursor.step(token)
    automaton.extend([BREAK, 4, 2, 3, 5])
    cursor.step(5)
    check_cursor(cursor, [1, 2, 3, 5, BREAK, 4, 2, 3, 5], [2, 3, 5], 1000)


def test_the_comparison_detects_a_cursor_missed_by_a_split() -> None:
    grow_under(SuffixCursor)
    with pytest.raises(AssertionError):
        grow_under(Unclimbing)
