"""Stores of text: bounds, what is not written twice, and who can read what."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft import text_store
from draft.suffix_automaton import SuffixAutomaton
from draft.text_store import KNOWN_TOKENS, OVERLAP_TOKENS, TextLibrary, TextStore, TextWriter
from specdec.core.types import Request

ROOMY = 1_000_000


def write(store: TextStore, text: list[int], budget: int = 7) -> None:
    writer = TextWriter(store, text)
    while writer.remaining:
        assert 0 < writer.work(budget) <= budget


def holds(store: TextStore, part: list[int]) -> bool:
    return any(inside(text, part) for text in store.generations)


def inside(text: SuffixAutomaton, part: list[int]) -> bool:
    state = 0
    for token in part:
        state = text.follow(state, token)
        if state < 0:
            return False
    return True


def novel(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10_000) for _ in range(count)]


def check_windows(texts: list[list[int]], budget: int, overlap: int) -> None:
    """Check that every short run of every text is found, whatever was omitted as known."""
    store = TextStore(ROOMY)
    for text in texts:
        write(store, text, budget)
        for at in range(len(text)):
            assert holds(store, text[at : at + overlap + 1]), (text, at)


def shrink(patch: pytest.MonkeyPatch, known: int, overlap: int) -> None:
    patch.setattr(text_store, "KNOWN_TOKENS", known)
    patch.setattr(text_store, "OVERLAP_TOKENS", overlap)


def test_every_short_run_of_every_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, 4, 2)

    @given(st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=5), st.integers(1, 50))
    def check(texts: list[list[int]], budget: int) -> None:
        check_windows(texts, budget, 2)

    check()


def test_the_check_of_runs_detects_a_missing_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = novel(30, 1), novel(10, 2)
    texts = [first, [*first[:15], *second, *first[15:]]]
    shrink(monkeypatch, 4, 2)
    check_windows(texts, 5, 2)
    shrink(monkeypatch, 4, 0)
    with pytest.raises(AssertionError):
        check_windows(texts, 5, 2)


def test_the_same_text_is_not_written_again() -> None:
    store, text = TextStore(ROOMY), novel(500, 3)
    write(store, text)
    size = store.young.size
    assert size == len(text)
    for _ in range(5):
        write(store, text)
        write(store, text[100:400])
    assert store.young.size == size


def test_only_the_edit_of_an_edited_text_is_written() -> None:
    store, text = TextStore(ROOMY), novel(500, 4)
    write(store, text)
    size = store.young.size
    edited = [*text[:200], *novel(5, 5), *text[210:], *novel(7, 6)]
    write(store, edited)
    assert store.young.size <= size + 5 + 7 + 4 * OVERLAP_TOKENS + 2
    seam = edited[200 - OVERLAP_TOKENS : 205 + OVERLAP_TOKENS]
    assert holds(store, seam)
    assert holds(store, edited[-7 - OVERLAP_TOKENS :])


def test_a_short_match_is_not_known_text() -> None:
    store, text = TextStore(ROOMY), novel(KNOWN_TOKENS - 1, 7)
    write(store, text)
    write(store, text)
    assert store.young.size == 2 * len(text) + 1


@given(st.integers(1, 60), st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=50), max_size=12))
def test_a_store_keeps_its_limit(limit: int, texts: list[list[int]]) -> None:
    store = TextStore(limit)
    for text in texts:
        write(store, text)
        assert sum(generation.size for generation in store.generations) <= max(2, limit)


def test_the_newest_half_is_always_kept_and_the_oldest_is_evicted() -> None:
    store = TextStore(400)
    texts = [novel(50, seed) for seed in range(20)]
    for at, text in enumerate(texts):
        write(store, text)
        for recent in texts[max(0, at - 2) : at + 1]:
            assert all(holds(store, recent[i : i + OVERLAP_TOKENS + 1]) for i in range(len(recent)))
    assert not any(holds(store, text[:5]) for text in texts[:10])


def test_used_text_is_kept() -> None:
    store, used = TextStore(400), novel(60, 100)
    for seed in range(20):
        write(store, used)
        write(store, novel(50, seed))
    assert holds(store, used)


def test_a_text_that_outlives_its_generation_is_continued() -> None:
    store, text = TextStore(120), novel(100, 1)
    write(store, text)
    assert holds(store, text[:49])
    assert inside(store.young, text[60:])


def library(shared_tokens: int = 262_144) -> TextLibrary:
    return TextLibrary(shared_tokens)


def request(salt: str = "", session: str = "") -> Request:
    return Request("r", (1, 2), cache_salt=salt, session=session)


def seen(of: TextLibrary, owner: Request, part: list[int]) -> bool:
    return any(holds(store, part) for store in of.stores(owner))


def test_salts_are_isolated() -> None:
    texts = library()
    texts.add(request("a", "editor"), [1, 2, 3])
    texts.work(1000)
    assert seen(texts, request("a", "editor"), [1, 2, 3])
    assert seen(texts, request("a"), [1, 2, 3])
    for other in (request("b", "editor"), request("", "editor"), request("b")):
        assert not seen(texts, other, [1, 2])


def test_each_session_has_a_store_beside_the_shared_one() -> None:
    texts = library()
    texts.add(request(session="one"), [1, 2, 3])
    texts.work(1000)
    one, shared = texts.stores(request(session="one"))
    two, other = texts.stores(request(session="two"))
    assert holds(one, [1, 2, 3])
    assert not holds(two, [1, 2])
    assert other is shared
    assert texts.stores(request()) == [shared]


def test_a_limit_of_zero_keeps_nothing() -> None:
    texts = library(0)
    texts.add(request(session="one"), [1, 2, 3])
    assert texts.stores(request(session="one")) == []


def test_recently_used_sessions_and_salts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "SESSIONS", 2)
    monkeypatch.setattr(text_store, "SALTS", 2)
    texts = library()
    for name in ("one", "two"):
        texts.add(request(name, name), [1, 2, 3])
    texts.work(1000)
    assert seen(texts, request("one", "one"), [1, 2, 3])  # and is now used later than the other
    texts.stores(request("three", "three"))
    assert seen(texts, request("one", "one"), [1, 2, 3])
    assert not seen(texts, request("two", "two"), [1, 2])


def test_work_is_bounded_and_resumes() -> None:
    texts = library()
    text = novel(100, 1)
    texts.add(request(), text)
    texts.work(40)
    assert not seen(texts, request(), text)
    assert not seen(texts, request(), text[45:50])
    texts.work(60)
    assert seen(texts, request(), text)


def test_a_queue_is_truncated_at_its_old_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_store, "MAX_QUEUED_TOKENS", 100)
    texts = library()
    for start in (0, 40, 80):
        texts.add(request(), list(range(start, start + 40)))
    texts.work(1000)
    assert not seen(texts, request(), [0, 1])
    assert seen(texts, request(), list(range(40, 80)))
    assert seen(texts, request(), list(range(80, 120)))


def test_a_text_is_copied_when_it_is_added() -> None:
    texts = library()
    tokens = [1, 2, 3]
    texts.add(request(), tokens)
    tokens[:] = [7, 8, 9]
    texts.work(1000)
    assert seen(texts, request(), [1, 2, 3])
    assert not seen(texts, request(), [7])
