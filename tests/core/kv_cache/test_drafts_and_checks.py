"""The draft model's side of a page, and the book check itself."""

from __future__ import annotations

import pytest

from specdec.core.kv_cache import KvCacheManager, PagePool, PrefixIndex, extend_keys
from tests.core.kv_cache.invariants import check_invariants, check_pages, match
from tests.core.kv_cache.sequences import compute, make_sequence, text


@pytest.mark.parametrize(("draft", "ready"), [(0, 0), (63, 0), (64, 64), (127, 64), (130, 128), (199, 192)])
def test_draft_tokens_count_whole_pages_that_the_draft_computed(draft: int, ready: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    compute(kv, make_sequence(text(200)), draft_tokens=draft)
    hit = match(kv, text(200))
    assert (hit.n_tokens, hit.draft_tokens) == (192, ready)


def test_a_draft_that_catches_up_marks_the_pages_later() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)), draft_tokens=64)
    compute(kv, seq, draft_tokens=192)
    assert match(kv, text(200)).draft_tokens == 192


def test_draft_tokens_never_exceed_what_the_target_published() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)), 70, draft_tokens=150)
    assert match(kv, text(200)).draft_tokens == 64
    compute(kv, seq, 130, draft_tokens=150)
    assert match(kv, text(200)).draft_tokens == 128


def test_the_draft_state_of_a_twin_does_not_change_the_indexed_page() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    compute(kv, make_sequence(text(100)))
    compute(kv, make_sequence(text(100)), draft_tokens=99)
    assert match(kv, text(100)).draft_tokens == 0


def test_draft_tokens_end_before_the_first_page_that_the_draft_has_not_computed() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    compute(kv, make_sequence(text(65)))  # its first page is the indexed one
    compute(kv, make_sequence(text(200)), draft_tokens=199)
    hit = match(kv, text(200))
    assert (hit.n_tokens, hit.draft_tokens) == (192, 0)


def test_a_page_reused_for_other_content_is_not_draft_ready() -> None:
    kv = KvCacheManager(2, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(100, 1)), draft_tokens=99))
    compute(kv, make_sequence(text(100, 2)))
    hit = match(kv, text(100, 2))
    assert (hit.n_tokens, hit.draft_tokens) == (64, 0)


def test_a_page_loaded_over_other_content_is_not_draft_ready() -> None:
    kv = KvCacheManager(1, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(64, 1)), 64, draft_tokens=64))
    keys: list[bytes] = []
    extend_keys(keys, text(65, 2), "", 1)
    kv.end_load(kv.begin_load(text(65, 2), "", keys, reserve=0), 1)
    hit = match(kv, text(65, 2))
    assert (hit.n_tokens, hit.draft_tokens) == (64, 0)


def test_a_twin_that_replaces_an_evicted_page_keeps_its_draft_state() -> None:
    kv = KvCacheManager(6, prefix_cache=True)
    first = compute(kv, make_sequence(text(65)))
    twin = compute(kv, make_sequence(text(200)), draft_tokens=128)
    kv.release(first)
    assert kv.ensure(make_sequence([0]), 2 * 64)
    kv.release(twin)
    hit = match(kv, text(200))
    assert (hit.n_tokens, hit.draft_tokens) == (192, 128)


def test_forget_drafts() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)), draft_tokens=199)
    kv.forget_drafts()
    assert match(kv, text(200)).draft_tokens == 0
    compute(kv, seq, draft_tokens=0)
    compute(kv, seq, draft_tokens=128)
    assert match(kv, text(200)).draft_tokens == 128


def test_check_requires_every_holder() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)))
    check_pages(kv)
    check_pages(kv, [seq])
    with pytest.raises(AssertionError, match="held by 0 sequences"):
        check_pages(kv, [])
    with pytest.raises(AssertionError, match="held by 2 sequences"):
        check_pages(kv, [seq, seq])


def _books() -> tuple[PagePool, PrefixIndex]:
    index = PrefixIndex(4)
    return PagePool(4, index.remove), index


def test_check_detects_a_lost_page() -> None:
    pool, index = _books()
    pool.references[pool.take(1)[0]] = 0
    with pytest.raises(AssertionError, match="1 pages are neither"):
        check_invariants(pool, index, None)


def test_check_detects_a_page_released_twice() -> None:
    pool, index = _books()
    (page,) = pool.take(1)
    pool.drop(page, keep=False)
    pool.references[page] = 1
    pool.drop(page, keep=False)
    with pytest.raises(AssertionError, match="free twice"):
        check_invariants(pool, index, None)


def test_check_detects_an_unreachable_idle_page() -> None:
    pool, index = _books()
    pool.drop(pool.take(1)[0], keep=True)
    with pytest.raises(AssertionError, match="not indexed"):
        check_invariants(pool, index, None)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_check_detects_a_chain_whose_root_would_be_evicted_first(order: tuple[int, int]) -> None:
    pool, index = _books()
    pages = pool.take(2)
    chain = [b"root", b"next"]
    for page, key in zip(pages, chain, strict=True):
        index.add(page, key)
    for i in order:
        pool.drop(pages[i], keep=True)
    if order == (1, 0):
        check_invariants(pool, index, [], [chain])
        assert list(pool._idle) == [pages[1], pages[0]]
        return
    with pytest.raises(AssertionError, match="would be evicted before"):
        check_invariants(pool, index, None, [chain])
    pool.evict(pages[0])
    with pytest.raises(AssertionError, match="cannot be reached"):
        check_invariants(pool, index, None, [chain])
