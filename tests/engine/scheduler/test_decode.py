"""Decoding sequences: a row every step, draft nodes by fair shares, preemption from the least important up."""

from __future__ import annotations

import pytest

from specdec.core.kv_cache import KvCacheManager
from specdec.core.sequence import SequencePhase
from specdec.engine.scheduler import Scheduler, SchedulerLimits
from specdec.errors import ConfigError
from tests.core.kv_cache.invariants import cached_pages, check_pages
from tests.engine.scheduler.rig import UNPACED, Rig, queued, rows_of


def test_every_decoding_sequence_gets_its_row() -> None:
    rig = Rig(max_step_rows=8)
    seqs = [rig.start(10) for _ in range(8)]
    plan = rig.plan(want=5)
    assert [e.seq for e in plan.entries] == seqs
    assert all((e.prefill, e.nodes, e.samples, rows_of(e)) == (0, 0, True, 1) for e in plan.entries)


def test_draft_nodes_are_shared_fairly() -> None:
    rig = Rig(max_step_rows=16)
    a, b, c = (rig.start(10) for _ in range(3))
    plan = rig.plan(lambda seq: {a: 2, b: 20, c: 20}[seq])
    assert [e.nodes for e in plan.entries] == [2, 6, 5]
    assert sum(rows_of(e) for e in plan.entries) == 16


def test_without_requested_nodes_nothing_is_drafted() -> None:
    rig = Rig()
    rig.start(10)
    assert [e.nodes for e in rig.plan(want=-3).entries] == [0]


def test_drafts_stop_at_the_context_limit() -> None:
    rig = Rig(max_context=20)
    seq = rig.start(15)
    assert (len(seq.tokens), seq.n_computed) == (16, 15)
    assert rig.plan(want=9).entries[0].nodes == 4  # slots 15 (the pending token) to 19
    while len(seq.tokens) < 20:
        rig.step()
    assert rig.plan(want=9).entries[0].nodes == 0


def test_slots_of_all_nodes_have_pages() -> None:
    rig = Rig()
    seq = rig.start(60)
    (entry,) = rig.plan(want=30).entries
    assert entry.nodes == 30
    assert len(seq.pages) * 64 >= seq.n_computed + rows_of(entry)
    assert len(seq.pages) == 2


def test_drafts_are_cut_to_the_pages_available() -> None:
    rig = Rig()
    (a,), (b,) = rig.add(60), rig.add(60)
    rig.step()
    rig.squeeze(0)
    plan = rig.plan(want=30)
    assert [e.nodes for e in plan.entries] == [3, 3]  # slot 60 is the pending token's, 61..63 are left
    assert plan.preempted == []
    assert (len(a.pages), len(b.pages)) == (1, 1)


def test_drafts_may_evict_cached_pages() -> None:
    rig = Rig()
    rig.scheduler.finish(rig.start(65))
    rig.start(60)
    rig.squeeze(1)
    assert (cached_pages(rig.kv), rig.kv.n_free) == (1, 1)
    assert rig.plan(want=30).entries[0].nodes == 30
    assert cached_pages(rig.kv) == 0


def test_pages_for_drafts_are_reclaimed_before_a_preemption() -> None:
    rig = Rig()
    (drafting,), (growing,) = rig.add(100), rig.add(60)
    rig.step()
    rig.commit(rig.plan(lambda seq: 40 if seq is drafting else 0))
    assert len(drafting.pages) == 3
    hog = rig.squeeze(0)
    plan = rig.until(lambda: len(growing.pages) == 2)
    assert plan.preempted == []
    assert len(drafting.pages) == 2
    assert drafting.preemptions == growing.preemptions == 0
    check_pages(rig.kv, [drafting, growing, hog])


def test_the_latest_arrival_is_preempted_first() -> None:
    rig = Rig()
    (a,), (b,), (c,) = rig.add(60), rig.add(30), rig.add(70)
    rig.step()
    hog = rig.squeeze(0)
    plan = rig.until(lambda: bool(c.preemptions))
    assert len(a.pages) == 2  # the page it was preempted for
    assert plan.preempted == [c]
    assert [e.seq for e in plan.entries] == [a, b]
    assert (c.phase, c.n_computed, c.draft_computed, c.preemptions) == (SequencePhase.WAITING, 0, 0, 1)
    assert c.pages == []
    assert queued(rig.scheduler) == [c]
    check_pages(rig.kv, [a, b, hog])


def test_priority_counts_before_arrival() -> None:
    rig = Rig()
    (low,), (high,) = rig.add(70, priority=-1), rig.add(60, priority=1)
    rig.step()
    rig.squeeze(0)
    plan = rig.until(lambda: bool(high.preemptions or low.preemptions))
    assert plan.preempted == [low]
    assert list(rig.scheduler.running) == [high]


def test_the_least_important_sequence_preempts_itself() -> None:
    rig = Rig()
    (first,), (last,) = rig.add(70), rig.add(60)
    rig.step()
    rig.squeeze(0)
    plan = rig.until(lambda: bool(last.preemptions))
    assert plan.preempted == [last]
    assert [e.seq for e in plan.entries] == [first]
    assert first.preemptions == 0


def test_a_preempted_sequence_returns_to_its_position_and_finds_its_pages() -> None:
    rig = Rig()
    (a,), (b,) = rig.add(130), rig.add(60)
    rig.step()
    rig.squeeze(0)
    (later,) = rig.add(5)
    rig.until(lambda: bool(b.preemptions))
    assert queued(rig.scheduler) == [b, later]
    rig.scheduler.finish(a)
    plan = rig.plan()
    assert plan.admitted == [b, later]
    assert b.n_computed == 64
    assert b.cached_tokens == 0  # the hit at first scheduling, not this one


def test_preempted_output_is_recomputed_from_the_cache_if_possible() -> None:
    rig = Rig(prefill_chunk=200)
    (a,), (b,) = rig.add(100), rig.add(100)
    rig.step()
    rig.squeeze(0)
    rig.until(lambda: bool(b.preemptions))
    tokens = list(b.tokens)
    assert len(tokens) == 129
    rig.scheduler.finish(a)
    plan = rig.plan()
    assert plan.admitted == [b]
    assert b.n_computed == 64  # a took the page that held 64..127
    assert b.tokens == tokens
    entry = rig.entry(plan, b)
    assert (entry.prefill, entry.samples) == (128 - 64, True)


def test_a_step_that_preempts_admits_no_request() -> None:
    rig = Rig()
    (first,), (last,) = rig.add(60), rig.add(130)
    rig.step()
    rig.squeeze(0)
    (urgent,) = rig.add(2, priority=1)
    plan = rig.until(lambda: bool(last.preemptions))
    assert (plan.admitted, rig.kv.n_free) == ([], 2)
    assert rig.plan().admitted == [urgent]
    assert first in rig.scheduler.running


def test_finish_is_idempotent_in_every_state() -> None:
    rig = Rig(max_batch=1)
    running = rig.start(100)
    (waiting,) = rig.add(10)
    leader, held = rig.add(100, n=2)
    for seq in (running, waiting, held, leader, running, waiting):
        rig.scheduler.finish(seq)
        assert seq.phase is SequencePhase.FINISHED
    assert rig.plan().entries == []
    assert (list(rig.scheduler.running), queued(rig.scheduler)) == ([], [])
    check_pages(rig.kv, [])
    assert rig.kv.n_free == rig.kv.n_total


def test_one_sequence_cannot_exhaust_the_cache() -> None:
    limits = SchedulerLimits(1, 64, 64, 129, 4)
    with pytest.raises(ConfigError, match="129 tokens do not fit a KV cache of 128"):
        Scheduler(KvCacheManager(2, prefix_cache=True), limits, UNPACED)
