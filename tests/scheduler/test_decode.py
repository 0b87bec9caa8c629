"""Decoding sequences: a row every step, draft nodes by fair shares, preemption from the least important up."""

from __future__ import annotations

import pytest

from specdec.errors import ConfigError
from specdec.kv_cache import KvCacheManager
from specdec.scheduler import Scheduler, SchedulerLimits
from specdec.sequence import SequencePhase
from tests.scheduler.rig import Rig


def test_every_decoding_sequence_gets_its_row() -> None:
    rig = Rig(max_step_rows=8)
    seqs = [rig.start(10) for _ in range(8)]
    plan = rig.plan(want=5)
    assert [e.seq for e in plan.entries] == seqs
    assert all((e.chain, e.nodes, e.samples, e.rows) == (0, 0, True, 1) for e in plan.entries)


def test_draft_nodes_are_shared_fairly() -> None:
    rig = Rig(max_step_rows=16)
    a, b, c = (rig.start(10) for _ in range(3))
    plan = rig.plan(lambda seq: {a: 2, b: 20, c: 20}[seq])
    assert [e.nodes for e in plan.entries] == [2, 6, 5]
    assert sum(e.rows for e in plan.entries) == 16


def test_nothing_wanted_nothing_drafted() -> None:
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
    assert len(seq.pages) * 64 >= seq.n_computed + entry.rows
    assert len(seq.pages) == 2


def test_drafts_are_cut_to_the_pages_available() -> None:
    rig = Rig(pages=2)
    a, b = rig.start(60), rig.start(60)
    assert rig.kv.n_free == 0
    plan = rig.plan(want=30)
    assert [e.nodes for e in plan.entries] == [3, 3]  # slots 60 is the pending token's, 61..63 are left
    assert plan.preempted == []
    assert {len(a.pages), len(b.pages)} == {1}


def test_drafts_may_evict_cached_pages() -> None:
    rig = Rig(pages=2)
    old = rig.start(65)
    rig.scheduler.finish(old)
    assert rig.kv.n_cached == 1
    rig.start(60)
    assert rig.plan(want=30).entries[0].nodes == 30
    assert rig.kv.n_cached == 0


def test_room_for_drafts_is_taken_back_before_anyone_is_preempted() -> None:
    rig = Rig(pages=4)
    drafting, growing = rig.start(100), rig.start(60)
    rig.commit(rig.plan(lambda seq: 40 if seq is drafting else 0))
    assert len(drafting.pages) == 3
    while len(growing.tokens) < 64:
        assert rig.step().preempted == []
    assert rig.kv.n_free == 0
    rig.step()
    plan = rig.step()
    assert plan.preempted == []
    assert (len(drafting.pages), len(growing.pages)) == (2, 2)
    rig.kv.check([drafting, growing])


def test_the_latest_arrival_is_preempted_first() -> None:
    rig = Rig(pages=4)
    a, b, c = rig.start(60), rig.start(30), rig.start(70)
    while len(a.tokens) <= 64:
        assert a.preemptions == b.preemptions == c.preemptions == 0
        last = rig.step()
    last = rig.plan()
    assert last.preempted == [c]
    assert [e.seq for e in last.entries] == [a, b]
    assert (c.state, c.n_computed, c.draft_computed, c.preemptions) == (SequencePhase.WAITING, 0, 0, 1)
    assert c.pages == []
    assert list(rig.scheduler.waiting) == [c]
    rig.kv.check([a, b])


def test_priority_counts_before_arrival() -> None:
    rig = Rig(pages=3)
    low = rig.start(70, priority=-1)
    high = rig.start(60, priority=1)
    while high.preemptions == low.preemptions == 0:
        plan = rig.step()
    assert plan.preempted == [low]
    assert high in rig.scheduler.running


def test_the_least_important_yields_itself() -> None:
    rig = Rig(pages=3)
    first, last = rig.start(70), rig.start(60)
    while last.preemptions == 0:
        plan = rig.step()
    assert plan.preempted == [last]
    assert [e.seq for e in plan.entries] == [first]
    assert first.preemptions == 0


def test_a_preempted_sequence_returns_to_its_place_and_finds_its_pages() -> None:
    rig = Rig(pages=4)
    a, b = rig.start(130), rig.start(60)
    (later,) = rig.add(600)[:1] if False else rig.add(100)
    while b.preemptions == 0:
        plan = rig.step()
    assert list(rig.scheduler.waiting) == [b, later]
    rig.scheduler.finish(a)
    plan = rig.step()
    assert plan.admitted[0] is b
    assert b.cached_tokens == 0  # the hit at first scheduling, not this one
    assert rig.entry(plan, b).chain + b.cached_tokens <= 64


def test_preempted_output_is_recomputed_from_the_cache_where_possible() -> None:
    rig = Rig(pages=4)
    a, b = rig.start(100), rig.start(100)
    while b.preemptions == 0:
        rig.step()
    tokens = list(b.tokens)
    assert b.n_output > 1
    rig.scheduler.finish(a)
    plan = rig.plan()
    assert plan.admitted == [b]
    assert b.n_computed in (64, 128)
    assert b.tokens == tokens
    entry = rig.entry(plan, b)
    assert (entry.chain, entry.samples) == (len(tokens) - 1 - b.n_computed, True)


def test_a_step_that_preempts_admits_nobody() -> None:
    rig = Rig(pages=3)
    rig.start(70)
    last = rig.start(60)
    rig.add(2)
    while last.preemptions == 0:
        plan = rig.step()
    assert plan.admitted == []


def test_finish_is_idempotent_in_every_state() -> None:
    rig = Rig(max_batch=1)
    running = rig.start(100)
    (waiting,) = rig.add(10)
    leader, held = rig.add(100, n=2)
    for seq in (running, waiting, held, leader, running, waiting):
        rig.scheduler.finish(seq)
        assert seq.state is SequencePhase.FINISHED
    assert rig.plan().entries == []
    assert (list(rig.scheduler.running), list(rig.scheduler.waiting)) == ([], [])
    rig.kv.check([])
    assert rig.kv.n_free == rig.kv.n_total


def test_one_sequence_must_not_be_able_to_exhaust_the_cache() -> None:
    limits = SchedulerLimits(1, 64, 64, 129, 4)
    with pytest.raises(ConfigError, match="129 tokens do not fit a KV cache of 128"):
        Scheduler(KvCacheManager(2, prefix_cache=True), limits)


@pytest.mark.parametrize(
    ("name", "values"),
    [("max_batch", (0, 8, 8, 8, 8)), ("max_queued", (1, 8, 8, 8, -1)), ("max_batch", (9, 8, 8, 8, 8))],
)
def test_limits_are_checked(name: str, values: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(*values)
