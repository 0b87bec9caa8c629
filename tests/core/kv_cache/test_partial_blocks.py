"""A partially computed page: a prompt that starts with its tokens continues writing to it."""

from __future__ import annotations

import random

import pytest

from specdec.core.kv_cache import KvCacheManager
from tests.core.kv_cache.invariants import cached_pages, check_pages
from tests.core.kv_cache.sequences import compute, make_sequence, text


@pytest.mark.parametrize("length", [2, 40, 64, 65, 100, 130])
def test_an_interrupted_prompt_continues_at_its_token(length: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    first = compute(kv, make_sequence(text(200)), length - 1)
    pages = list(first.pages)
    kv.release(first)
    second = make_sequence(text(200))
    assert kv.uncached(second) == 200 - length
    assert kv.admit(second) is not None
    check_pages(kv, [second])
    assert second.n_computed == length - 1
    held = (length - 1 + 63) // 64
    assert second.pages[:held] == pages[:held]


@pytest.mark.parametrize("agreeing", [0, 1, 20, 35])
def test_a_partial_block_matches_up_to_its_tokens(agreeing: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(100)), draft_tokens=90))
    other = make_sequence([*text(100)[: 64 + agreeing], *text(50, 1)])
    hit = kv.admit(other)
    assert hit is not None
    assert hit.n_tokens == 64 + agreeing == other.n_computed
    # The draft read no page to its end but the first, of the other as much as it had.
    assert hit.draft_tokens == 64 + min(agreeing, 26)
    check_pages(kv, [other])


@pytest.mark.parametrize(("there", "length"), [(60, 2), (60, 40), (110, 66), (110, 90)])
def test_the_last_token_of_a_shorter_prompt_is_pending(there: int, length: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(there))))
    shorter = make_sequence(text(length))
    assert kv.admit(shorter) is not None
    assert shorter.n_computed == length - 1
    check_pages(kv, [shorter])


def test_a_partial_block_is_draft_ready_only_after_the_pages_before_it() -> None:
    """A twin, whose first page is not the indexed one."""
    kv = KvCacheManager(8, prefix_cache=True)
    first, twin = make_sequence(text(65)), make_sequence(text(100))
    assert kv.admit(first) is not None
    assert kv.admit(twin) is not None
    compute(kv, first)
    kv.release(compute(kv, twin, draft_tokens=99))
    hit = kv.admit(make_sequence(text(100)))
    assert hit is not None
    assert (hit.n_tokens, hit.draft_tokens) == (99, 0)


def test_no_partial_block_follows_unpublished_pages() -> None:
    """Of a sequence that ends in the middle of a step that failed."""
    kv = KvCacheManager(8, prefix_cache=True)
    seq = make_sequence(text(100))
    assert kv.admit(seq) is not None
    seq.n_computed = 99
    kv.release(seq)
    check_pages(kv, [])
    assert (cached_pages(kv), kv.n_free, kv.cached_tokens(text(100), "")) == (0, 8, 0)


def test_a_partial_block_being_written_is_found_by_no_other() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(100))))
    second, third = make_sequence(text(120)), make_sequence(text(120))
    assert kv.admit(second) is not None
    assert kv.admit(third) is not None
    assert (second.n_computed, third.n_computed) == (99, 64)
    check_pages(kv, [second, third])


def test_the_last_partial_block_after_a_page_is_kept() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    long = compute(kv, make_sequence(text(120)))
    other = compute(kv, make_sequence([*text(80), 7, 8, 9]))
    kv.release(long)
    kv.release(other)
    check_pages(kv, [])
    assert cached_pages(kv) == 2
    assert kv.cached_tokens(text(120), "") == 80


def test_partial_blocks_are_separated_by_salt() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(30), "alice")))
    assert kv.cached_tokens(text(30), "bob") == 0
    assert kv.cached_tokens(text(30), "alice") == 29


def test_a_partial_block_is_evicted_before_the_pages_it_follows() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(200))))
    hog = make_sequence([0])
    assert kv.ensure(hog, 64)
    check_pages(kv, [hog])
    assert kv.cached_tokens(text(200), "") == 192


@pytest.mark.parametrize("length", [40, 100])
def test_forgetting_drafts_includes_partial_blocks(length: int) -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    kv.release(compute(kv, make_sequence(text(length)), draft_tokens=length - 1))
    kv.forget_drafts()
    hit = kv.admit(make_sequence(text(length)))
    assert hit is not None
    assert (hit.n_tokens, hit.draft_tokens) == (length - 1, 0)


def test_partial_blocks_can_be_disabled() -> None:
    kv = KvCacheManager(8, prefix_cache=True, partial_blocks=False)
    kv.release(compute(kv, make_sequence(text(100))))
    assert (cached_pages(kv), kv.cached_tokens(text(100), "")) == (1, 64)


def test_accounting_is_exact_after_any_operations() -> None:
    """Sequences of few texts come, grow and go at random; each token found was computed under the same text."""
    rng, kv = random.Random(3), KvCacheManager(12, prefix_cache=True)
    holds: list[int | None] = [None] * (12 * 64)  # the content for which each slot was last computed
    running, released = [], []
    for _ in range(1500):
        if running and rng.random() < 0.5:
            seq = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.7:
                kv.release(seq)
                released.append(seq)
            else:
                upto = min(len(seq.tokens) - 1, seq.n_computed + rng.randrange(90))
                for slot in range(seq.n_computed, upto):
                    holds[seq.pages[slot // 64] * 64 + slot % 64] = hash(tuple(seq.tokens[: slot + 1]))
                compute(kv, seq, upto)
                running.append(seq)
        else:
            length, turn = rng.randrange(1, 260), rng.randrange(1, 200)
            seq = make_sequence([*text(length)[:turn], *text(length, rng.randrange(2))[turn:]])
            if kv.admit(seq) is not None:
                running.append(seq)
                for slot in range(seq.n_computed):
                    assert holds[seq.pages[slot // 64] * 64 + slot % 64] == hash(tuple(seq.tokens[: slot + 1]))
        check_pages(kv, running, released)
