"""Allocation and release of pages: all or nothing, least recently used out first, chains stay reachable."""

from __future__ import annotations

import pytest

from specdec.core.kv_cache import KvCacheManager, extend_keys, pages_for
from tests.core.kv_cache.invariants import cached_pages, check_pages, match
from tests.core.kv_cache.sequences import compute, make_sequence, text


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_a_manager_needs_pages() -> None:
    with pytest.raises(ValueError, match="n_pages"):
        KvCacheManager(0, prefix_cache=True)


def test_ensure_is_all_or_nothing() -> None:
    kv = KvCacheManager(3, prefix_cache=True)
    first, second = make_sequence([1]), make_sequence([2])
    assert kv.ensure(first, 65)
    assert not kv.ensure(second, 65)
    assert (len(first.pages), second.pages, kv.n_free) == (2, [], 1)
    assert kv.ensure(second, 64)
    assert kv.ensure(second, 10)
    assert set(first.pages).isdisjoint(second.pages)
    check_pages(kv, [first, second])


def test_release_returns_everything_and_is_idempotent() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)))
    assert kv.n_free == 0
    for _ in range(2):
        kv.release(seq)
        check_pages(kv, [])
        assert kv.n_free == kv.n_total == 4
    assert seq.pages == []
    assert cached_pages(kv) == 4


def test_idle_pages_are_evicted_least_recently_used_first() -> None:
    kv = KvCacheManager(5, prefix_cache=True)
    for seed in (1, 2, 3):
        kv.release(compute(kv, make_sequence(text(65, seed))))
    again = make_sequence(text(65, 1))
    again.pages = match(kv, again.tokens).pages
    kv.release(again)
    hog = make_sequence([0])
    assert kv.ensure(hog, 3 * 64)  # two free pages and the idle one used longest ago, text 2
    assert [len(match(kv, text(65, seed)).pages) for seed in (1, 2, 3)] == [1, 0, 1]


def test_a_chain_is_evicted_from_its_end() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(200))))
    for taken, left in ((1, 3), (2, 2), (3, 1), (4, 0)):
        hog = make_sequence([0])
        assert kv.ensure(hog, taken * 64)
        hit = match(kv, text(200))
        assert len(hit.pages) == left
        seq = make_sequence(text(200))
        seq.pages = hit.pages
        check_pages(kv, [hog, seq])
        kv.release(seq)
        kv.release(hog)


def test_referenced_pages_are_never_evicted() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    seq = compute(kv, make_sequence(text(130)))
    assert not kv.ensure(make_sequence([0]), 2 * 64)
    assert kv.ensure(make_sequence([0]), 64)
    assert match(kv, text(130)).pages == seq.pages[:2]


def test_a_twin_keeps_a_chain_reachable_when_the_first_copy_was_evicted() -> None:
    kv = KvCacheManager(6, prefix_cache=True)
    first = compute(kv, make_sequence(text(65)))
    twin = compute(kv, make_sequence(text(200)))  # its first page is a twin of first's, its others are indexed
    assert twin.pages[0] != first.pages[0]
    kv.release(first)
    hog = make_sequence([0])
    assert kv.ensure(hog, 2 * 64)  # evicts first's page
    check_pages(kv, [twin, hog])
    assert match(kv, text(200)).pages == []
    pages = list(twin.pages)
    kv.release(twin)
    check_pages(kv, [hog])
    assert match(kv, text(200)).pages == pages[:3]


def test_releasing_a_twin_refreshes_the_indexed_page() -> None:
    kv = KvCacheManager(6, prefix_cache=True)
    first = compute(kv, make_sequence(text(65)))
    twin = compute(kv, make_sequence(text(200)))
    indexed = first.pages[0]
    kv.release(first)
    kv.release(twin)
    check_pages(kv, [])
    hog = make_sequence([0])
    assert kv.ensure(hog, 4 * 64)
    assert match(kv, text(200)).pages[:1] == [indexed]


def test_flush_frees_unreferenced_pages() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    held = compute(kv, make_sequence(text(130, 1)))
    kv.release(compute(kv, make_sequence(text(130, 2))))
    assert kv.flush() == 3
    check_pages(kv, [held])
    assert match(kv, text(130, 2)).pages == []
    assert cached_pages(kv) == 2
    kv.release(held)
    kv.flush()
    assert (cached_pages(kv), kv.n_free) == (0, 8)


def test_trim_releases_only_pages_beyond_the_length() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(130)))
    assert kv.ensure(seq, 300)
    kv.trim(seq, 130)
    assert (len(seq.pages), kv.n_free) == (3, 5)
    kv.trim(seq, 0)  # computed KV is never given back
    assert len(seq.pages) == 3
    check_pages(kv, [seq])


def test_admit_allocates_prefix_and_pages_or_changes_nothing() -> None:
    kv = KvCacheManager(5, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(130)), draft_tokens=64))
    before = list(match(kv, text(130)).pages)
    holder = make_sequence(text(130))
    holder.pages = before
    kv.release(holder)

    seq = make_sequence(text(200))
    assert kv.admit(seq, reserve=2) is None  # 4 pages and 2 more do not fit 5, hits or not
    assert (seq.pages, seq.n_computed, kv.n_free) == ([], 0, 5)
    check_pages(kv, [])
    hit = kv.admit(seq, reserve=1)
    assert hit is not None
    assert seq.pages[:2] == before
    assert (len(seq.pages), seq.n_computed, seq.draft_computed) == (4, 129, 64)
    check_pages(kv, [seq])


def test_pages_held_by_others_are_free_for_an_admission() -> None:
    kv = KvCacheManager(5, prefix_cache=True)
    first = compute(kv, make_sequence(text(200)))
    second = make_sequence(text(200))
    assert kv.admit(second, reserve=1) is None
    assert kv.admit(second) is not None
    assert kv.n_free == 0
    check_pages(kv, [first, second])


def test_a_page_that_is_computed_during_a_load_outlives_those_behind_it() -> None:
    kv, tokens = KvCacheManager(8, prefix_cache=True), text(200)
    whole = make_sequence(tokens)
    extend_keys(whole.page_keys, tokens, "", 3)
    load = kv.begin_load(tokens, "", set(whole.page_keys), 0)
    kv.release(compute(kv, make_sequence(tokens[:70])))
    kv.end_load(load, 3)
    check_pages(kv, released=[whole])
    assert kv.cached_tokens(tokens, "") == 192


def test_a_load_takes_no_page_that_its_prefix_or_the_reserve_needs() -> None:
    for reserve, taken in ((0, 2), (1, 1), (2, 0), (5, 0)):
        kv = KvCacheManager(4, prefix_cache=True)
        tokens = text(400)
        kv.release(compute(kv, make_sequence(tokens[:130]), 128))
        keys = list[bytes]()
        extend_keys(keys, tokens, "", 6)
        load = kv.begin_load(tokens, "", set(keys), reserve)
        assert (len(load.cached), len(load.pages)) == (2, taken)
        assert kv.n_free == 2 - taken
        kv.end_load(load, taken)
        assert match(kv, tokens).n_tokens == 64 * (2 + taken)
