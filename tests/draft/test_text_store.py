"""Stores of text: bounds, what is not written twice, and who can read what."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft import text_store
from draft.suffix import SuffixReader
from draft.text_store import TextLibrary, TextStore
from specdec.core.types import Request
from tests.draft.helpers import make_sequence
from tests.draft.native_lookups import changed_lookups, lookups

ROOMY = 1_000_000
KNOWN_TOKENS, OVERLAP_TOKENS = 32, 16  # of csrc/suffix.cpp


def new_store(limit: int = ROOMY) -> TextStore:
    return TextStore(lookups(), limit)


def write(store: TextStore, text: list[int]) -> None:
    store.write(array("i", text))


def holds(store: TextStore, part: list[int], library: ctypes.PyDLL | None = None) -> bool:
    """Whether the store holds ``part``, or every run in it of as many tokens as a match is followed."""
    runs = [part[at : at + 32] for at in range(max(1, len(part) - 31))]
    readers = [SuffixReader(library or lookups(), make_sequence(run), [store]) for run in runs]
    return all(reader.match(run, c_int64(0)) == len(run) for reader, run in zip(readers, runs, strict=True))


def novel(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(count)]


def check_windows(library: ctypes.PyDLL, texts: list[list[int]], overlap: int) -> None:
    """Check that every short run of every text is found, whatever was omitted as known."""
    store = TextStore(library, ROOMY)
    for text in texts:
        write(store, text)
        for at in range(len(text)):
            assert holds(store, text[at : at + overlap + 1], library), (text, at)


def shrunk(folder: Path, overlap: int = 2) -> ctypes.PyDLL:
    """The library with short matches and overlaps."""
    sizes = ("KNOWN_TOKENS = 32", "KNOWN_TOKENS = 4"), ("OVERLAP_TOKENS = 16", f"OVERLAP_TOKENS = {overlap}")
    return changed_lookups(folder, "suffix.cpp", *sizes)


def test_every_short_run_of_every_text_is_kept(tmp_path: Path) -> None:
    library = shrunk(tmp_path)

    @given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=5))
    def check(texts: list[list[int]]) -> None:
        check_windows(library, texts, 2)

    check()


def test_the_check_of_runs_detects_a_missing_overlap(tmp_path: Path) -> None:
    first, second = novel(30, 1), novel(10, 2)
    texts = [first, [*first[:15], *second, *first[15:]]]
    check_windows(shrunk(tmp_path), texts, 2)
    with pytest.raises(AssertionError):
        check_windows(shrunk(tmp_path, 0), texts, 2)


def check_unwritten(text: list[int], again: Callable[[int], list[int]], room: int) -> None:
    """Check that a store with ``room`` for few tokens still holds the first text after ``again`` was written often."""
    other, store = novel(50, 1000), new_store(2 * (50 + len(text) + room))
    write(store, other)
    write(store, text)
    for turn in range(20):
        write(store, again(turn))
    assert holds(store, other)


def test_the_same_text_is_not_written_again() -> None:
    text = novel(500, 3)
    check_unwritten(text, lambda turn: text if turn % 2 else text[100:400], room=2)


def test_only_the_edit_of_an_edited_text_is_written() -> None:
    text = novel(500, 4)

    def edited(turn: int) -> list[int]:
        return [*text[:200], *novel(5, turn), *text[210:], *novel(7, 100 + turn)]

    check_unwritten(text, edited, room=20 * (5 + 7 + 4 * OVERLAP_TOKENS + 2))
    store = new_store()
    write(store, text)
    write(store, edited(1))
    assert holds(store, edited(1)[200 - OVERLAP_TOKENS : 205 + OVERLAP_TOKENS])
    assert holds(store, edited(1)[-7 - OVERLAP_TOKENS :])


def test_a_short_match_is_not_known_text() -> None:
    text = novel(KNOWN_TOKENS - 1, 7)
    with pytest.raises(AssertionError):
        check_unwritten(text, lambda turn: text, room=2)
    check_unwritten([*text, 1], lambda turn: [*text, 1], room=2)


def test_the_newest_half_is_always_kept_and_the_oldest_is_evicted() -> None:
    store = new_store(400)
    texts = [novel(50, seed) for seed in range(20)]
    for at, text in enumerate(texts):
        write(store, text)
        for recent in texts[max(0, at - 2) : at + 1]:
            assert all(holds(store, recent[i : i + OVERLAP_TOKENS + 1]) for i in range(len(recent)))
    assert not any(holds(store, text[:5]) for text in texts[:10])


def test_used_text_is_kept() -> None:
    store, used = new_store(400), novel(60, 100)
    for seed in range(20):
        write(store, used)
        write(store, novel(50, seed))
    assert holds(store, used)


def test_a_text_that_outlives_its_generation_is_continued() -> None:
    store, text = new_store(120), novel(100, 1)
    write(store, text)
    assert holds(store, text[:49])
    assert holds(store, text[60:])


def library(shared_tokens: int = 262_144) -> TextLibrary:
    return TextLibrary(lookups(), shared_tokens)


def request(salt: str = "", session: str = "") -> Request:
    return Request("r", (1, 2), cache_salt=salt, session=session)


def seen(of: TextLibrary, owner: Request, part: list[int]) -> bool:
    return any(holds(store, part) for store in of.stores(owner))


def test_salts_are_isolated() -> None:
    texts = library()
    texts.add(request("a", "editor"), array("i", [1, 2, 3]))
    assert seen(texts, request("a", "editor"), [1, 2, 3])
    assert seen(texts, request("a"), [1, 2, 3])
    for other in (request("b", "editor"), request("", "editor"), request("b")):
        assert not seen(texts, other, [1, 2])


def test_each_session_has_a_store_beside_the_shared_one() -> None:
    texts = library()
    texts.add(request(session="one"), array("i", [1, 2, 3]))
    one, shared = texts.stores(request(session="one"))
    two, other = texts.stores(request(session="two"))
    assert holds(one, [1, 2, 3])
    assert not holds(two, [1, 2])
    assert other is shared
    assert texts.stores(request()) == [shared]


def test_a_limit_of_zero_keeps_nothing() -> None:
    texts = library(0)
    texts.add(request(session="one"), array("i", [1, 2, 3]))
    assert texts.stores(request(session="one")) == []


def test_recently_used_sessions_and_salts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "SESSIONS", 2)
    monkeypatch.setattr(text_store, "SALTS", 2)
    texts = library()
    for name in ("one", "two"):
        texts.add(request(name, name), array("i", [1, 2, 3]))
    assert seen(texts, request("one", "one"), [1, 2, 3])  # and is now used later than the other
    texts.stores(request("three", "three"))
    assert seen(texts, request("one", "one"), [1, 2, 3])
    assert not seen(texts, request("two", "two"), [1, 2])
