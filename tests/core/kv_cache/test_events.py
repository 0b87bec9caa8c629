"""A subscriber to the events of a cache always knows which blocks it contains."""

from __future__ import annotations

import random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.kv_event_messages import Form, block_hash, pack_batch
from specdec.core.cache_events import BlocksStored, CacheCleared, CacheRecorder
from specdec.core.kv_cache import KvCacheManager, page_key, pages_for, root_key
from specdec.core.sequence import Sequence
from tests.core.kv_cache.invariants import check_pages
from tests.core.kv_cache.sequences import compute, make_sequence, text
from tests.server.kv_events.subscriber import CacheView, decoded


def told(kv: KvCacheManager, *, salted: bool = False) -> CacheRecorder:
    recorder = CacheRecorder(salted=salted)
    kv.follow(recorder)
    return recorder


def cached_blocks(
    kv: KvCacheManager, texts: list[tuple[list[int], str]]
) -> dict[int, tuple[tuple[int, ...], int | None]]:
    """All blocks of ``texts`` that the cache's own index holds: by hash, their tokens and the hash before."""
    found = {}
    for tokens, salt in texts:
        key, before = root_key(salt), None
        for start in range(0, len(tokens) - 63, 64):
            block = tuple(tokens[start : start + 64])
            key = page_key(key, block)
            if kv._index.page_of.get(key) is not None:
                found[block_hash(key)] = (block, before)
            before = block_hash(key)
    return found


class Workload:
    """Sequences that come, grow, are given back and push each other out, as ``seed`` has it."""

    def __init__(self, seed: int, salts: tuple[str, ...]) -> None:
        self._draw = random.Random(seed)
        self.kv = KvCacheManager(self._draw.randrange(3, 14), prefix_cache=True)
        self._salts, self._running, self._released = salts, list[Sequence](), list[Sequence]()
        self.texts: list[tuple[list[int], str]] = []

    def act(self) -> None:
        draw, kv = self._draw, self.kv
        what = draw.choice("aaggrf" if self._running else "aaf")
        if what == "a":
            self._admit()
        elif what == "f" and draw.random() < 0.2:
            kv.flush()
        elif what == "g" and self._running:
            seq = draw.choice(self._running)
            n_tokens = draw.randrange(seq.n_computed, len(seq.tokens))
            if kv.ensure(seq, len(seq.tokens)):
                seq.n_computed = n_tokens
                kv.publish(seq)
                seq.tokens += draw.choices(range(3), k=draw.randrange(90))
        elif what == "r" and self._running:
            seq = self._running.pop(draw.randrange(len(self._running)))
            self.texts.append((list(seq.tokens), seq.salt))
            kv.release(seq)
            self._released.append(seq)
        check_pages(kv, self._running, self._released)

    def _admit(self) -> None:
        start = text(200, self._draw.randrange(3))[: self._draw.randrange(1, 200)]
        seq = make_sequence(start + self._draw.choices(range(2), k=self._draw.randrange(1, 90)), self._salt())
        if self.kv.n_total >= pages_for(len(seq.tokens)) and self.kv.admit(seq) is not None:
            self._running.append(seq)

    def _salt(self) -> str:
        return self._draw.choice(self._salts)

    def all_texts(self) -> list[tuple[list[int], str]]:
        return self.texts + [(list(seq.tokens), seq.salt) for seq in self._running]


@pytest.mark.parametrize("form", ["map", "positional"])
@pytest.mark.parametrize("salted", [False, True])
@given(seed=st.integers(0, 10**9))
def test_events_reproduce_the_cached_blocks(seed: int, form: Form, salted: bool) -> None:
    work = Workload(seed, ("", "", "a"))
    recorder, view = told(work.kv, salted=salted), CacheView()
    for _ in range(40):
        for _ in range(3):
            work.act()
        view.apply(decoded(pack_batch(recorder.take(), form)))
        known = [each for each in work.all_texts() if salted or not each[1]]
        assert view.blocks == cached_blocks(work.kv, known)
        if salted:
            assert len(view.blocks) == len(work.kv._index.page_of)  # partial pages are not blocks


@pytest.mark.parametrize("released", [False, True])
def test_twins_of_evicted_pages_are_published_in_order_before_the_next_page(released: bool) -> None:
    """A router drops blocks whose parent it does not know."""
    kv = KvCacheManager(16, prefix_cache=True)
    first, second = make_sequence(text(300)), make_sequence(text(300))
    assert kv.admit(first) is not None
    assert kv.admit(second) is not None
    compute(kv, first, 192)
    compute(kv, second, 192)
    kv.release(first)
    kv.flush()
    recorder = told(kv)
    if released:
        kv.release(second)
    else:
        compute(kv, second)
    (stored,) = recorder.take()
    assert isinstance(stored, BlocksStored)
    assert (stored.parent, stored.tokens) == (None, text(192 if released else 256))
    check_pages(kv, [second])


def test_a_chain_can_be_hashed_from_its_events() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    recorder, view, tokens = told(kv), CacheView(), text(200)
    seq = compute(kv, make_sequence(tokens), 70)
    view.apply(decoded(pack_batch(recorder.take(), "map")))
    compute(kv, seq)
    view.apply(decoded(pack_batch(recorder.take(), "map")))
    key, before = root_key(""), None
    for start in range(0, 192, 64):
        key = page_key(key, tokens[start : start + 64])
        assert view.blocks[block_hash(key)] == (tuple(tokens[start : start + 64]), before)
        before = block_hash(key)


def test_pages_of_one_prompt_are_one_event() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    recorder = told(kv)
    seq = compute(kv, make_sequence(text(200)))
    (stored,) = recorder.take()
    assert isinstance(stored, BlocksStored)
    assert (len(stored.keys), stored.parent, stored.tokens) == (3, None, text(192))
    kv.release(seq)
    assert recorder.take() == []
    kv.flush()
    assert recorder.take() == [CacheCleared()]


def test_all_followers_are_told() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    first, second = told(kv), told(kv)
    kv.release(compute(kv, make_sequence(text(200))))
    stored = first.take()
    assert stored == second.take() != []
    kv.flush()
    assert first.take() == second.take() == [CacheCleared()]


def test_salted_pages_are_not_published() -> None:
    kv = KvCacheManager(4, prefix_cache=True)
    recorder = told(kv)
    kv.release(compute(kv, make_sequence(text(200), "tenant")))
    compute(kv, make_sequence(text(200, 2), "tenant"))  # pushes the first one out
    kv.flush()
    assert recorder.take() == []


def test_published_salted_pages_have_distinct_hashes() -> None:
    kv = KvCacheManager(8, prefix_cache=True)
    recorder = told(kv, salted=True)
    compute(kv, make_sequence(text(130)))
    compute(kv, make_sequence(text(130), "tenant"))
    plain, salted = decoded(pack_batch(recorder.take(), "map"))
    assert "extra_keys" not in plain
    assert salted["extra_keys"] == [[root_key("tenant").hex()], None]
    assert b"tenant" not in pack_batch([BlocksStored([bytes(16)], None, text(64), "tenant")], "map")
    assert set(plain["block_hashes"]).isdisjoint(salted["block_hashes"])


def test_the_fields_are_vllms() -> None:
    """By name as of vLLM#42892, by place before it."""
    stored = BlocksStored([bytes(8) + b"\0" * 7 + b"\1"], b"\xff" * 16, text(64), "")
    _, events, rank = msgpack.unpackb(pack_batch([stored, CacheCleared()], "map"))
    assert events == [
        {
            "type": "BlockStored", "block_hashes": [1], "parent_block_hash": (1 << 64) - 1, "token_ids": text(64),
            "block_size": 64, "lora_id": None, "medium": "GPU", "lora_name": None,
        },
        {"type": "AllBlocksCleared"},
    ]  # fmt: skip
    assert rank == 0
    _, events, _ = msgpack.unpackb(pack_batch([stored, CacheCleared()], "positional"))
    assert events == [
        ["BlockStored", [1], (1 << 64) - 1, text(64), 64, None, "GPU", None],
        ["AllBlocksCleared"],
    ]
