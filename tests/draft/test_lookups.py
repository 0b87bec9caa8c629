"""Trees of the native lookups, node by node, against plain search through the same texts."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft.index import MAX_CONTEXT_TOKENS, IndexDrafter, IndexShelf
from draft.protocol import Drafter
from draft.suffix import SuffixDrafter
from draft.text_store import BREAK
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from tests.draft.helpers import make_sequence, make_task
from tests.draft.lookup_oracle import (
    Context,
    grow,
    longest_suffix,
    places,
    repeated_suffix,
    seen_in_index,
    seen_in_text,
)
from tests.draft.native_lookups import changed_lookups, lookups
from tests.draft.test_token_index import write


def check_tree(drafter: Drafter, sequence: Sequence, contexts: list[Context], rng: random.Random) -> None:
    """Check the tree of ``drafter`` for a random task, and its match."""
    longest = max((len(pattern) for _, pattern in contexts), default=0)
    assert drafter.match([sequence]) == [Match(min(longest, Match.STRONG))]
    task = make_task(sequence, rng.randrange(12), rng.randrange(7), rng.randrange(1, 5))
    (tree,) = drafter.propose([task])
    expected = grow(task, contexts, seen_in_text if isinstance(drafter, SuffixDrafter) else seen_in_index)
    assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
    assert tree.scores == pytest.approx(expected.scores, abs=1e-9)


def check_suffixes(library: ctypes.PyDLL, seed: int) -> None:
    """A request with a prediction, beside which texts of others arrive."""
    rng = random.Random(seed)
    symbols = rng.randrange(2, 7)

    def text(most: int) -> list[int]:
        return [rng.randrange(symbols) for _ in range(rng.randrange(1, most))]

    drafter, stored, other = SuffixDrafter(library, 10_000), list[int](), text(12)
    sequence = make_sequence(text(14), prediction_ids=tuple(other))
    drafter.begin(sequence)
    for _ in range(8):
        if rng.random() < 0.4:
            earlier = text(12)
            drafter.end(begun(drafter, earlier))
            stored += [*([BREAK] if stored else []), *earlier]
        own = [*other, BREAK, *sequence.tokens]
        contexts = [(own, repeated_suffix(own)), (stored, longest_suffix(sequence.tokens, stored, 32))]
        check_tree(drafter, sequence, contexts, rng)
        sequence.tokens += text(3)


def begun(drafter: Drafter, tokens: list[int]) -> Sequence:
    sequence = make_sequence(tokens)
    drafter.begin(sequence)
    return sequence


def check_indexes(library: ctypes.PyDLL, folder: Path, seed: int) -> None:
    """A request that drafts from two indexes."""
    rng = random.Random(seed)
    symbols = rng.randrange(3, 9)
    texts = [[[rng.randrange(symbols) for _ in range(rng.randrange(1, 40))] for _ in range(2)] for _ in range(2)]
    paths = {f"i{n}": write(folder / f"i{n}", files, symbols) for n, files in enumerate(texts)}
    drafter = IndexDrafter(library, IndexShelf(paths, "f"))
    sequence = make_sequence([rng.randrange(symbols) for _ in range(rng.randrange(1, 10))])
    drafter.begin(sequence)
    for _ in range(5):
        contexts = [found for files in texts for found in index_contexts(files, sequence.tokens)]
        check_tree(drafter, sequence, contexts, rng)
        sequence.tokens.append(rng.randrange(symbols))


def index_contexts(files: list[list[int]], tokens: list[int]) -> list[Context]:
    """The longest suffix of ``tokens`` in ``files``, and those of half and a quarter of its length that occur more
    often."""
    text = [token for file in files for token in (*file, BREAK)]
    found, occurrences = list[Context](), 0
    n = len(longest_suffix(tokens, text, MAX_CONTEXT_TOKENS))
    while n:
        now = len(places(text, tokens[-n:]))
        if now > occurrences:
            found.append((text, tokens[-n:]))
            occurrences = now
        n //= 2
    return found


@given(st.integers(0, 10**9))
def test_suffixes_are_those_of_a_plain_search(seed: int) -> None:
    check_suffixes(lookups(), seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexes")


@given(st.integers(0, 10**9))
def test_indexes_are_searched_like_plain_texts(folder: Path, seed: int) -> None:
    check_indexes(lookups(), folder, seed)


AUTOMATON, SUFFIX, INDEX, BEST = "automaton.h", "suffix.cpp", "index.cpp", "best_first.h"
BROKEN = {
    "no state is split": (AUTOMATON, "whole ? target : split(state, token, target)", "target"),
    "a split state loses followers": (AUTOMATON, "if (states_[target].branch >= 0) {", "if (false) {"),
    "a split moves one follower only": (AUTOMATON, "*next = clone;\n", "*next = clone;\n      break;\n"),
    "new text is not matched again": (AUTOMATON, "automaton->size() != size_ ||", ""),
    "the end of a text is proposed": (SUFFIX, "if (token >= 0) found", "found"),
    "no shorter context": (SUFFIX, "state = text->link(state);", "break;"),
    "the end of an index is proposed": (INDEX, "if ((uint32_t)token != index->separator) found", "found"),
    "a span begins too late": (INDEX, "index->bound(end, at, length, &token, 1, 0)", "at"),
    "a span ends too early": (INDEX, "index->bound(at + 1, high, length, &token, 1, 1)", "at + 1"),
    "entries are lost": (INDEX, "pattern, length) < order)", "pattern, length) <= order)"),
    "ties in another order": (BEST, "order > other.order", "order < other.order"),
    "contexts share no chance": (BEST, "known->chance += chance;", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_search_detects(what: str, tmp_path: Path) -> None:
    file, right, wrong = BROKEN[what]
    library = changed_lookups(tmp_path / "src", file, (right, wrong))
    suffixes, indexes = partial(check_suffixes, library), partial(check_indexes, library, tmp_path)
    check = indexes if file == INDEX else suffixes
    with pytest.raises(AssertionError):
        for_all(check)


def for_all(check: Callable[[int], None]) -> None:
    for seed in range(400):
        check(seed)
