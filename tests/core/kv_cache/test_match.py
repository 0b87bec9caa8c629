"""Matches of the prefix cache: exactly the full, computed pages of the same tokens under the same salt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.kv_cache import KvCacheManager
from tests.core.kv_cache.invariants import cached_pages, check_pages, match
from tests.core.kv_cache.sequences import compute, make_sequence, text
from verify_kernels.forward_batch import PAGE_SIZE


@pytest.mark.parametrize(
    ("n_computed", "pages"), [(0, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2), (191, 2), (192, 3)]
)
def test_a_page_is_published_once_all_its_tokens_are_computed(n_computed: int, pages: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)), n_computed)
    hit = match(kv, text(200))
    assert hit.pages == seq.pages[:pages]
    assert hit.n_tokens == pages * PAGE_SIZE


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (193, 3), (500, 3)])
def test_the_pending_token_is_never_covered(length: int, pages: int) -> None:
    kv = KvCacheManager(16, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)))
    hit = match(kv, text(500)[:length])
    assert hit.pages == seq.pages[:pages]
    assert hit.n_tokens <= max(0, length - 1)


def test_a_match_holds_a_reference() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    first = compute(kv, make_sequence(text(200)))
    second = make_sequence(text(200))
    second.pages = match(kv, second.tokens).pages
    check_pages(kv, [first, second])
    kv.release(first)
    check_pages(kv, [second])
    assert kv.n_free == 1
    kv.release(second)
    check_pages(kv, [])
    assert kv.n_free == 4


def test_another_salt_never_hits() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    compute(kv, make_sequence(text(200), "alice"))
    assert match(kv, text(200), "bob").pages == []
    assert match(kv, text(200)).pages == []
    assert len(match(kv, text(200), "alice").pages) == 3


def test_a_page_of_equal_tokens_after_another_prefix_does_not_match() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    beginning, other, shared = text(64, 1), text(64, 2), text(64, 3)
    compute(kv, make_sequence([*other, *shared, 7]))
    seq = compute(kv, make_sequence([*beginning, 7]))
    assert match(kv, [*beginning, *shared, 7]).pages == seq.pages[:1]


@given(st.integers(0, 127), st.integers(1, 1000))
def test_one_changed_token_ends_the_match_at_its_page(position: int, change: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)))
    other = text(200)
    other[position] += change
    assert match(kv, other).pages == seq.pages[: position // PAGE_SIZE]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    kv = KvCacheManager(8, prefix_cache=False)
    seq = compute(kv, make_sequence(text(200)))
    assert match(kv, text(200)).pages == []
    assert cached_pages(kv) == 0
    kv.release(seq)
    check_pages(kv, [])
    assert kv.n_free == 8


def test_of_two_pages_with_equal_content_the_first_is_kept() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    first, second = make_sequence(text(200)), make_sequence(text(200))
    compute(kv, first)
    own = list(compute(kv, second).pages)
    assert second.pages == own
    assert set(first.pages).isdisjoint(own)
    assert match(kv, text(200)).pages == first.pages[:3]
    assert cached_pages(kv) == 3


def test_output_tokens_are_cached_like_prompt_tokens() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(100)))
    assert cached_pages(kv) == 1
    seq.tokens += text(200)[100:]
    compute(kv, seq)
    assert match(kv, text(200)).n_tokens == 192


def test_each_page_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import specdec.core.kv_cache as module

    hashed: list[int] = []
    real = module.page_key
    monkeypatch.setattr(
        module, "page_key", lambda previous, tokens: hashed.append(len(tokens)) or real(previous, tokens)
    )
    kv = KvCacheManager(8, prefix_cache=True)
    seq = make_sequence(text(300))
    assert kv.admit(seq) is not None
    for n_computed in range(0, 300, 10):
        compute(kv, seq, n_computed)
    kv.release(seq)
    assert kv.admit(seq) is not None
    assert hashed == [PAGE_SIZE] * 4


def test_a_restarted_sequence_is_published_again() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    seq = compute(kv, make_sequence(text(200)))
    kv.release(seq)
    kv.flush()
    seq.n_computed = 0
    compute(kv, seq)
    assert match(kv, text(200)).pages == seq.pages[:3]


def test_a_running_prompt_shares_only_pages_that_it_is_yet_to_compute() -> None:
    """Not one that it has computed itself, whose cached twin was evicted."""
    kv = KvCacheManager(16, prefix_cache=True)
    twin, running, waiting = (make_sequence(text(200)) for _ in range(3))
    assert [kv.will_share(running, waiting, pages) for pages in (1, 3, 4)] == [True, True, False]
    assert not KvCacheManager(16, prefix_cache=False).will_share(running, waiting, 1)
    compute(kv, twin, 64)
    compute(kv, running, 64)
    assert kv.will_share(running, waiting, 1)
    kv.release(twin)
    kv.flush()
    assert kv.cached_tokens(waiting.tokens, "") == 0
    assert not kv.will_share(running, waiting, 1)


def test_pages_that_a_prompt_may_not_take_from_the_cache_are_not_awaited() -> None:
    kv = KvCacheManager(16, prefix_cache=True)
    running, embedded = make_sequence(text(200)), make_sequence(text(200))
    embedded.most_cached = 64  # the states of later tokens are needed
    assert [kv.will_share(running, embedded, pages) for pages in (1, 2)] == [True, False]


def test_a_prompt_gets_no_key_of_a_page_that_it_has_yet_to_fill() -> None:
    kv = KvCacheManager(16, prefix_cache=True)
    running, longer = make_sequence(text(100)), make_sequence(text(200))
    assert not kv.will_share(running, longer, 2)
    running.tokens = text(200)  # the output continues as the longer prompt does
    compute(kv, running)
    assert match(kv, text(200)).n_tokens == 192
