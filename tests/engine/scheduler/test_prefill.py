"""Prompts are computed in chunks, in the same steps as decodes, in order of importance. Admission allocates pages for
the whole prompt."""

from __future__ import annotations

import pytest

from specdec.core.sequence import SequencePhase
from specdec.engine.scheduler import DUE_SHARE, PATIENCE_S
from tests.core.kv_cache.invariants import check_pages, match
from tests.engine.scheduler.rig import Rig, queued, rows_of


def test_a_prompt_is_computed_in_chunks() -> None:
    rig = Rig(prefill_chunk=100)
    (seq,) = rig.add(251)
    seen = []
    while seq.n_output == 0:
        (entry,) = rig.step(want=0).entries
        seen.append((entry.prefill, entry.samples))
    assert seen == [(100, False), (100, False), (50, True)]


def test_a_one_token_prompt_is_sampled_immediately() -> None:
    rig = Rig()
    (seq,) = rig.add(1)
    plan = rig.plan()
    assert plan.admitted == [seq]
    assert [(e.prefill, e.samples, rows_of(e)) for e in plan.entries] == [(0, True, 1)]


def test_the_chunk_is_shared_by_all_prompts_in_order() -> None:
    rig = Rig(prefill_chunk=100)
    first, second, third = rig.add(71)[0], rig.add(71)[0], rig.add(71)[0]
    plan = rig.step()
    assert [(e.seq, e.prefill, e.samples) for e in plan.entries] == [(first, 70, True), (second, 30, False)]
    assert third.phase is SequencePhase.WAITING
    plan = rig.step()
    assert [(e.seq, e.prefill, e.samples) for e in plan.entries] == [
        (first, 0, True), (second, 40, True), (third, 60, False),
    ]  # fmt: skip


def test_rows_limit_a_step_and_leave_the_pending_row_for_the_next() -> None:
    rig = Rig(max_batch=4, max_step_rows=64, prefill_chunk=64)
    (seq,) = rig.add(65)
    assert [(e.prefill, e.samples) for e in rig.step().entries] == [(64, False)]
    assert [(e.prefill, e.samples) for e in rig.step().entries] == [(0, True)]
    assert seq.n_output == 1


def test_decodes_never_wait_for_a_prefill() -> None:
    rig = Rig(max_step_rows=64, prefill_chunk=64)
    decoding = rig.start(10)
    (prompt,) = rig.add(500)
    steps = 0
    while prompt.n_output == 0:
        plan = rig.step()
        assert rig.entry(plan, decoding).samples
        assert sum(rows_of(e) for e in plan.entries) <= 64
        steps += 1
    assert steps == 8  # 63 prompt rows in addition to the decode's one: 499 = 7 x 63 + 58
    assert decoding.n_output == 1 + steps


def test_heavy_drafting_leaves_three_quarters_of_the_rows_to_prompts() -> None:
    rig = Rig(max_step_rows=64, prefill_chunk=64)
    decoding = rig.start(10)
    (prompt,) = rig.add(500)
    plan = rig.plan(want=60)
    assert rig.entry(plan, decoding).nodes == 64 - 1 - 48
    assert rig.entry(plan, prompt).prefill == 48
    (waiting,) = rig.add(500)
    rig.commit(plan)
    assert rig.entry(rig.plan(want=60), prompt).prefill == 48
    assert waiting.phase is SequencePhase.WAITING


def test_bug_nodes_reserved_for_drafts_do_not_split_a_prompt() -> None:
    rig = Rig(max_step_rows=256, prefill_chunk=192)
    decoding = [rig.start(10) for _ in range(5)]
    (prompt,) = rig.add(120)
    plan = rig.plan(want=31)
    assert (rig.entry(plan, prompt).prefill, rig.entry(plan, prompt).samples) == (119, True)
    assert all(rig.entry(plan, seq).nodes >= 11 for seq in decoding)


def test_a_prompt_that_ends_may_draft_with_the_remaining_rows() -> None:
    rig = Rig(max_step_rows=64, prefill_chunk=64)
    (seq,) = rig.add(50)
    (entry,) = rig.plan(want=60).entries
    assert (entry.prefill, entry.samples, entry.nodes) == (49, True, 14)
    assert len(seq.pages) * 64 >= rows_of(entry)


def test_a_prompt_that_does_not_end_has_no_nodes() -> None:
    rig = Rig(prefill_chunk=32)
    rig.add(50)
    assert [(e.samples, e.nodes) for e in rig.plan(want=60).entries] == [(False, 0)]


def test_a_cached_prefix_is_not_recomputed() -> None:
    rig = Rig()
    first = rig.start(200, seed=5)
    (second,) = rig.add(180, seed=5)
    plan = rig.plan()
    assert second.pages[:2] == first.pages[:2]
    assert (second.cached_tokens, second.n_computed) == (128, 128)
    assert rig.entry(plan, second).prefill == 51


def test_admission_leaves_a_page_for_each_running_sequence() -> None:
    rig = Rig(pages=5)
    a, b = rig.start(10), rig.start(10)
    (c,) = rig.add(100)
    assert rig.kv.n_free == 3
    assert rig.step().admitted == []  # its two pages and two in reserve are four
    rig.scheduler.finish(b)
    assert rig.step().admitted == [c]
    check_pages(rig.kv, [a, c])


def test_a_big_request_at_the_head_is_overtaken_until_it_is_due() -> None:
    rig = Rig(pages=6)
    rig.start(100)
    (big,) = rig.add(300)
    rig.now += PATIENCE_S - 0.1
    (small,) = rig.add(10)
    assert rig.step().admitted == [small]
    rig.now += 0.1
    rig.add(10)
    (urgent,) = rig.add(10, priority=1)
    assert rig.step().admitted == [urgent]
    for seq in list(rig.scheduler.running):
        rig.scheduler.finish(seq)
    assert big in rig.step().admitted


def test_bug_a_deadline_counts_before_it_has_passed() -> None:
    rig = Rig(pages=6)
    rig.start(100)
    (big,) = rig.add(300, deadline_s=8.0)
    rig.now += DUE_SHARE * 8.0 - 0.1
    (small,) = rig.add(10)
    assert rig.step().admitted == [small]
    rig.now += 0.1
    rig.add(10)
    assert rig.step().admitted == []
    for seq in list(rig.scheduler.running):
        rig.scheduler.finish(seq)
    assert rig.step().admitted[0] is big


def test_bug_a_preempted_answer_is_not_overtaken_behind_one_that_is_not_due() -> None:
    rig = Rig(pages=10)
    kept = rig.start(100)
    begun = rig.start(300)
    rig.now -= 1.0
    (older,) = rig.add(500)
    rig.now += 1.0
    rig.scheduler.preempt(begun)
    rig.step()
    rig.squeeze(left=3)
    (small,) = rig.add(10)
    plan = rig.step()
    assert queued(rig.scheduler) == [older, begun, small]
    assert (plan.admitted, list(rig.scheduler.running)) == ([], [kept])


def test_a_lower_priority_does_not_pass_a_big_request() -> None:
    rig = Rig(pages=6)
    rig.start(100)
    rig.add(300, priority=1)
    rig.add(10)
    assert rig.step().admitted == []


def test_priority_then_arrival_order_admission() -> None:
    rig = Rig(max_batch=2)
    first, second, urgent = rig.add(5)[0], rig.add(5)[0], rig.add(5, priority=3)[0]
    assert rig.plan().admitted == [urgent, first]
    assert queued(rig.scheduler) == [second]
    assert list(rig.scheduler.running) == [urgent, first]


def test_max_batch() -> None:
    rig = Rig(max_batch=3)
    for _ in range(5):
        rig.add(5)
    assert len(rig.plan().entries) == 3
    assert len(rig.scheduler.running) == 3


def test_prefill_only_never_samples_and_reports_its_end() -> None:
    rig = Rig(prefill_chunk=100)
    (seq,) = rig.add(151, max_tokens=0)
    assert [(e.prefill, e.samples, e.nodes) for e in rig.step(want=5).entries] == [(100, False, 0)]
    assert [(e.prefill, e.samples, e.nodes) for e in rig.step(want=5).entries] == [(50, False, 0)]
    assert not seq.prefilling
    plan = rig.step(want=5)  # an engine would have finished it here; it gets no row
    assert (plan.entries, plan.prefilled) == ([], [seq])
    rig.scheduler.finish(seq)
    assert match(rig.kv, seq.tokens).n_tokens == 128


def test_prefill_only_with_nothing_to_compute_ends_at_admission() -> None:
    rig = Rig()
    rig.scheduler.finish(rig.start(129, seed=9))
    (cached,) = rig.add(129, seed=9, max_tokens=0)
    (single,) = rig.add(1, max_tokens=0)
    plan = rig.plan()
    assert plan.entries == []
    assert plan.prefilled == plan.admitted == [cached, single]


@pytest.mark.parametrize("priority", [0, 1])
def test_pages_for_draft_nodes_keep_no_prompt_out(priority: int) -> None:
    rig = Rig(pages=8, max_batch=2)
    decoding = rig.start(100)
    rig.step(want=200)
    assert len(decoding.pages) > 2
    (waiting,) = rig.add(310, priority=priority)  # five pages, and one stays free for each running sequence
    plan = rig.step(want=200)
    assert waiting in plan.admitted
    assert not plan.preempted
    assert rig.entry(plan, decoding).nodes > 0
