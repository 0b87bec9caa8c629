"""The prediction drafter: aligned, edited, moved, and fed nonsense."""

from __future__ import annotations

import copy
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft import prediction
from draft.prediction import (
    MAX_MATCH_TOKENS,
    MAX_PLACES,
    PLACES_AFTER,
    PLACES_BEFORE,
    SEED_TOKENS,
    PredictionCursor,
    PredictionDrafter,
    PredictionIndex,
)
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from tests.draft.helpers import accepted, code_like, make_sequence, propose, replay

PROMPT = [8001, 8002]
tokens = st.lists(st.integers(0, 6), max_size=60)


def begun(of: PredictionDrafter, expected: list[int], output: list[int]) -> Sequence:
    """A sequence that expects ``expected`` and has generated ``output``, token by token."""
    sequence = make_sequence(PROMPT, prediction_ids=tuple(expected))
    of.begin(sequence)
    for token in output:
        propose(of, sequence)
        sequence.tokens.append(token)
    return sequence


def speed(expected: list[int], output: list[int], nodes: int = 15) -> float:
    """Tokens per step."""
    return replay(PredictionDrafter(), make_sequence(PROMPT, prediction_ids=tuple(expected)), output, nodes)


def edit(text: list[int], rate: float, rng: random.Random) -> list[int]:
    """``text`` with runs of 1 to 8 tokens replaced, put in, dropped or brought from elsewhere."""
    out: list[int] = []
    at = 0
    while at < len(text):
        if rng.random() >= rate:
            out.append(text[at])
            at += 1
            continue
        kind, size = rng.choice(["replace", "insert", "delete", "move"]), rng.randint(1, 8)
        if kind == "move":
            source = rng.randrange(len(text))
            out += text[source : source + 24]
        elif kind != "delete":
            out += [rng.choice(text) if rng.random() < 0.5 else 9000 + rng.randrange(500) for _ in range(size)]
        at += size if kind in ("replace", "delete") else 0
    return out


def test_only_sequences_with_a_prediction_are_served_and_forgotten_at_their_end() -> None:
    drafter = PredictionDrafter()
    sequence = begun(drafter, [1, 2, 3], [1, 2])
    assert drafter.serves(sequence)
    assert not drafter.serves(make_sequence(PROMPT))
    drafter.end(sequence)
    assert not drafter._cursors


def test_a_correct_prediction_takes_full_steps() -> None:
    text = code_like(640, 1)
    assert speed(text, text) > 15.5


@pytest.mark.parametrize(("rate", "least"), [(0.01, 8.0), (0.03, 5.5), (0.06, 4.0), (0.1, 2.8)])
def test_edits_cost_a_few_steps_each(rate: float, least: float) -> None:
    for seed in range(5):
        text = code_like(800, seed)
        assert speed(text, edit(text, rate, random.Random(seed))) > least


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_drafting_recovers_from_any_single_edit_immediately(size: int) -> None:
    text, new = list(range(400)), list(range(7000, 7000 + size))
    outputs = {
        "replace": [*text[:200], *new, *text[200 + size :]],
        "insert": [*text[:200], *new, *text[200:]],
        "delete": [*text[:200], *text[200 + size :]],
    }
    for kind, output in outputs.items():
        steps = len(output) / speed(text, output)
        assert steps <= 400 / 16 + size + 3, kind  # the new tokens cannot be predicted


def test_a_moved_block_is_found() -> None:
    text = code_like(600, 3)
    moved = [*text[300:450], *text[:300], *text[450:]]
    assert speed(text, moved) > 10


@pytest.mark.parametrize("heading", [[9001], [9001, 9002], list(range(9000, 9030))])
def test_a_heading_before_the_predicted_text(heading: list[int]) -> None:
    text = code_like(400, 4)
    assert len([*heading, *text]) / speed(text, [*heading, *text]) <= len(heading) + 400 / 16 + 8


@pytest.mark.parametrize("cut", [[9001], [9001, 9002], []])
def test_first_tokens_split_differently(cut: list[int]) -> None:
    text = code_like(400, 5)
    output = [*cut, *text[1:]]
    assert len(output) / speed(text, output) <= 400 / 16 + 5


def test_after_an_unknown_token_all_three_positions_are_possible() -> None:
    drafter, text = PredictionDrafter(), list(range(100, 140))
    tree = propose(drafter, begun(drafter, text, [*text[:10], 7]), nodes=8)
    assert accepted(tree, text[11:]) >= 2  # replaced
    assert accepted(tree, text[10:]) >= 2  # put in
    tree = propose(drafter, begun(drafter, text, [*text[:10], text[14]]), nodes=9)
    assert accepted(tree, text[15:]) >= 2  # dropped
    assert tree.tokens[1] == text[15]


def test_scores_increase_with_the_length_of_the_match() -> None:
    drafter, text = PredictionDrafter(), list(range(100, 160))
    firsts = [propose(drafter, begun(drafter, text, text[:count])).scores[1] for count in (0, 1, 3, 10, 40)]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 5


def test_the_end_of_the_prediction_ends_the_draft() -> None:
    drafter, text = PredictionDrafter(), list(range(100, 120))
    assert propose(drafter, begun(drafter, text, text[:18]), nodes=31).tokens == [117, 118, 119]
    assert len(propose(drafter, begun(drafter, text, text))) == 1
    assert len(propose(drafter, begun(drafter, text, [*text, 1, 2, 3]))) <= 2


@given(tokens, tokens, st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))
def test_any_output_of_any_prediction(expected: list[int], output: list[int], nodes: int, depth: int, w: int) -> None:
    drafter = PredictionDrafter()
    sequence = make_sequence(PROMPT, prediction_ids=tuple(expected))
    drafter.begin(sequence)
    followed = set(pairwise(expected))
    for token in output:
        tree = propose(drafter, sequence, nodes, depth, w)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            assert tree.tokens[node] in expected
            assert parent == 0 or (tree.tokens[parent], tree.tokens[node]) in followed
        sequence.tokens.append(token)
    drafter.end(sequence)
    assert not drafter._cursors


few = st.integers(0, 2)


@given(st.lists(few, max_size=60), st.lists(few, min_size=1, max_size=6), st.integers(0, 60))
def test_find_returns_the_longest_match_nearest_first(text: list[int], recent: list[int], near: int) -> None:
    index = PredictionIndex(text)
    index.grow(1000)

    def length(place: int) -> int:
        sizes = range(1, min(place, len(recent), MAX_MATCH_TOKENS) + 1)
        return max((size for size in sizes if text[place - size : place] == recent[-size:]), default=0)

    far = {place: length(place) for place in range(1, len(text) + 1) if length(place) >= SEED_TOKENS}
    ahead = {place: length(place) for place in range(near + 1, len(text) + 1) if length(place)}
    place, size = index.find(recent, near)
    after = sorted(place for place in far if place >= near)[:PLACES_AFTER]
    before = sorted((place for place in far if place < near), reverse=True)[:PLACES_BEFORE]
    if far:
        looked = [*after, *before]
        assert (place, size) == max(
            ((p, far[p]) for p in looked), key=lambda found: (found[1], -looked.index(found[0]))
        )
    elif size:
        assert (
            ahead[place] == size == max(ahead[p] for p in sorted(ahead)[:PLACES_AFTER] if p <= near + MAX_MATCH_TOKENS)
        )
    else:
        assert all(p > near + MAX_MATCH_TOKENS for p in ahead)


class CountingIndex(PredictionIndex):
    """Counts the tokens compared."""

    compared = 0

    def _length(self, recent: list[int], place: int) -> int:  # type: ignore[override]
        length = super()._length(recent, place)
        self.compared += length + 1
        return length


@pytest.mark.parametrize("expected", [[5] * 4000, [5, 6] * 2000, [*[5] * 20, 6] * 190], ids=["same", "two", "runs"])
def test_repetition_costs_bounded_work_per_token(expected: list[int]) -> None:
    rng = random.Random(1)
    output = [rng.choice((5, 5, 5, 6, 7)) for _ in range(500)]
    cursor = PredictionCursor(index := CountingIndex(expected))
    index.grow(10_000)
    for token in output:
        before = index.compared
        cursor.advance(token)
        assert index.compared - before <= (PLACES_AFTER + PLACES_BEFORE) * (MAX_MATCH_TOKENS + 1)
        assert len(cursor.places) <= MAX_PLACES
        positions = [place.position for place in cursor.places]
        assert len(positions) == len(set(positions))


def test_a_long_prediction_is_indexed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "INDEXED_PER_STEP", 10)
    drafter, text = PredictionDrafter(), list(range(100, 140))
    sequence = make_sequence(PROMPT, prediction_ids=tuple(text))
    drafter.begin(sequence)
    index = drafter._cursors[sequence].index
    for step in range(5):
        assert index.find(text[30:33], 0) == ((33, 3) if step == 4 else (-1, 0))
        assert drafter.match([sequence]) == [Match.STRONG]


def test_all_samples_together_index_as_much_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "INDEXED_PER_STEP", 10)
    drafter, first = PredictionDrafter(), make_sequence(PROMPT, prediction_ids=tuple(range(100, 140)))
    other = make_sequence(PROMPT, prediction_ids=tuple(range(200, 240)))
    second = copy.copy(first)  # another sample of the request
    for sequence in (first, second, other):
        drafter.begin(sequence)
    index, others = drafter._cursors[first].index, drafter._cursors[other].index
    assert drafter._cursors[second].index is index
    for step in range(1, 9):
        drafter.match([first, second, other])
        assert index._indexed + others._indexed == 10 * step


def test_an_output_beyond_the_prediction_has_no_match() -> None:
    drafter = PredictionDrafter()
    for output, match in (([100], Match.STRONG), ([100, 101], Match.NONE)):
        assert drafter.match([begun(drafter, [100, 101], output)]) == [match]


def test_a_prompt_is_not_output() -> None:
    drafter = PredictionDrafter()
    sequence = make_sequence([100, 101, 102], prediction_ids=(100, 101, 102, 103))
    drafter.begin(sequence)
    assert propose(drafter, sequence).tokens == [102, 100, 101, 102, 103]
    sequence.tokens.append(100)
    assert propose(drafter, sequence, nodes=3).tokens == [100, 101, 102, 103]
