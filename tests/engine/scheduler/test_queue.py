"""The queue: its bound, and prompts that wait for the pages that another one computes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.sequence import SequencePhase
from specdec.engine.scheduler import fair_shares
from specdec.errors import QueueFullError
from tests.core.kv_cache.invariants import check_pages
from tests.core.kv_cache.sequences import make_request, make_samples, text
from tests.engine.scheduler.rig import Rig, queued


def test_the_queue_is_bounded_in_requests() -> None:
    rig = Rig(max_batch=1, max_queued=2)
    rig.start(5)
    rig.add(100, n=4)
    rig.add(5)
    assert rig.scheduler.n_waiting_requests == 2
    with pytest.raises(QueueFullError) as caught:
        rig.add(5)
    assert caught.value.limit == 2
    assert caught.value.retry_after_s == 1.0
    assert len(queued(rig.scheduler)) == 5


def test_a_queue_of_size_zero_accepts_a_request_while_a_slot_is_free() -> None:
    rig = Rig(max_batch=1, max_queued=0)
    rig.start(5)
    with pytest.raises(QueueFullError):
        rig.add(5)
    rig.scheduler.finish(rig.scheduler.running[0])
    assert rig.start(5).n_output == 1


def test_a_request_with_a_running_sample_does_not_wait() -> None:
    rig = Rig(max_batch=1)
    rig.add(10, n=3)
    assert rig.scheduler.n_waiting_requests == 1
    rig.step()
    assert rig.scheduler.n_waiting_requests == 0
    assert len(queued(rig.scheduler)) == 2


def test_siblings_wait_for_the_prompt_and_then_share_its_pages() -> None:
    rig = Rig(prefill_chunk=100)
    leader, *siblings = rig.add(200, n=3)
    for _ in range(2):
        assert {e.seq for e in rig.step().entries} == {leader}
    plan = rig.plan()
    assert plan.admitted == siblings
    for seq in siblings:
        assert seq.pages[:3] == leader.pages[:3]
        assert seq.cached_tokens == 192
        assert rig.entry(plan, seq).prefill == 7
    check_pages(rig.kv, [leader, *siblings])


def test_siblings_keep_their_position_before_later_requests() -> None:
    rig = Rig(max_batch=2)
    leader, sibling = rig.add(100, n=2)
    rig.step()
    (later,) = rig.add(5)
    assert rig.plan().admitted == [sibling]
    assert list(rig.scheduler.running) == [leader, sibling]
    assert queued(rig.scheduler) == [later]


def test_held_siblings_do_not_block_the_queue() -> None:
    rig = Rig()
    leader, _ = rig.add(100, n=2)
    (later,) = rig.add(5)
    assert rig.plan().admitted == [leader, later]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_siblings_without_a_page_to_share_start_together(prefix_cache: bool) -> None:
    rig = Rig(prefix_cache=prefix_cache)
    samples = rig.add(64 if prefix_cache else 150, n=3)
    admitted = []
    for _ in range(3):
        admitted += rig.step().admitted
    assert admitted == samples
    assert samples[0].n_output <= samples[1].n_output + 1


def test_if_the_leader_is_aborted_during_prefill_the_next_sample_leads() -> None:
    rig = Rig(prefill_chunk=50)
    leader, second, third = rig.add(200, n=3)
    rig.step()
    rig.scheduler.finish(leader)
    assert rig.step().admitted == [second]
    assert third.phase is SequencePhase.WAITING
    rig.until(lambda: second.n_output > 0)
    assert third.phase is SequencePhase.WAITING
    assert rig.plan().admitted == [third]
    assert third.cached_tokens == 192


def test_if_the_leader_ends_early_its_siblings_follow() -> None:
    rig = Rig()
    leader, *siblings = rig.add(150, n=3)
    rig.step()
    rig.scheduler.finish(leader)
    assert rig.plan().admitted == siblings
    assert [seq.cached_tokens for seq in siblings] == [149, 128]  # the page that the leader had in part goes to one


def test_aborting_all_samples_leaves_nothing_queued() -> None:
    rig = Rig()
    for seq in rig.add(150, n=4):
        rig.scheduler.finish(seq)
    assert rig.plan().entries == []
    assert rig.scheduler.n_waiting_requests == 0


def test_equal_prompts_of_different_requests_are_computed_once() -> None:
    rig = Rig(prefill_chunk=150)
    (first,) = rig.add(200, seed=7)
    rig.step()
    (second,), (other,) = rig.add(200, seed=7), rig.add(40)
    assert rig.step().admitted == [other]
    assert first.n_output == 1
    plan = rig.plan()
    assert plan.admitted == [second]
    assert (second.cached_tokens, rig.entry(plan, second).prefill) == (192, 7)


def test_a_prompt_waits_for_the_pages_that_it_has_in_common_only() -> None:
    rig = Rig()
    (first,) = rig.add(500, seed=7)
    rig.step()
    rig.step()  # 384 tokens are computed
    (second,) = make_samples(make_request(text(130, 7) + text(170, 8)), rig.now)
    rig.scheduler.add([second])
    (third,) = rig.add(600, seed=7)
    assert rig.step().admitted == [second]
    assert second.cached_tokens == 128
    assert rig.plan().admitted == [third]
    assert (first.n_output, third.cached_tokens) == (1, 448)


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        ({"length": 400}, {"length": 250}, {}),
        ({"length": 200, "priority": 1}, {"length": 200, "priority": 2}, {}),
        ({"length": 200}, {"length": 200, "deadline_s": 1.0}, {}),
        ({"length": 200, "seed": 8}, {"length": 200}, {}),
        ({"length": 200}, {"length": 200}, {"prefix_cache": False}),
    ],
    ids=["longer", "less important", "later", "another text", "no cache"],
)
def test_no_prompt_waits_for_one_that_would_delay_it(
    first: dict[str, Any], second: dict[str, Any], changes: dict[str, Any]
) -> None:
    rig = Rig(prefill_chunk=150, **changes)
    rig.add(**{"seed": 7, **first})
    rig.step()
    (seq,) = rig.add(**{"seed": 7, **second})
    assert rig.plan().admitted == [seq]


def test_no_prompt_waits_for_pages_of_another_text() -> None:
    rig = Rig(prefill_chunk=110)
    rig.add(200, seed=7)
    rig.step()
    (seq,) = make_samples(make_request(text(70, 7) + text(130, 8)), rig.now)
    rig.scheduler.add([seq])
    assert rig.plan().admitted == [seq]
    assert seq.cached_tokens == 64


def test_however_many_wait_for_pages_another_prompt_starts() -> None:
    rig = Rig(prefill_chunk=150, max_batch=2)
    rig.add(200, seed=7)
    rig.step()
    for _ in range(3):
        rig.add(200, seed=7)
    (other,) = rig.add(200)
    assert rig.plan().admitted == [other]


def test_only_sequences_of_one_salt_wait_for_each_other() -> None:
    rig = Rig(prefill_chunk=512, max_step_rows=600)
    samples = [make_samples(make_request(text(200, 7), salt), rig.now)[0] for salt in "aba"]
    for seq in samples:
        rig.scheduler.add([seq])
    assert rig.plan().admitted == samples[:2]


def test_a_waiting_prompt_keeps_no_less_important_one_waiting() -> None:
    rig = Rig(prefill_chunk=150)
    rig.add(200, seed=7, priority=5)
    rig.step()
    (second,), (third,) = rig.add(200, seed=7, priority=5), rig.add(100, priority=1)
    assert rig.plan().admitted == [third]
    assert queued(rig.scheduler) == [second]


def test_the_last_place_is_kept_for_a_more_important_prompt_that_waits_for_pages() -> None:
    rig = Rig(prefill_chunk=150, max_batch=2)
    rig.add(200, seed=7, priority=5)
    rig.step()
    (second,), (third,) = rig.add(200, seed=7, priority=5), rig.add(30, priority=1)
    assert rig.step().admitted == []
    assert rig.step().admitted == [second]
    assert queued(rig.scheduler) == [third]


def test_no_prompt_waits_for_fewer_pages_than_a_step_is_worth() -> None:
    rig = Rig(prefill_chunk=1024, max_step_rows=1024)
    prompts = [text(330, 7), text(130, 7) + text(200, 8), text(64, 7) + text(270, 9)]
    seqs = [make_samples(make_request(prompt), rig.now)[0] for prompt in prompts]
    for seq in seqs:
        rig.scheduler.add([seq])
    assert rig.plan().admitted == [seqs[0], seqs[2]]


def test_a_prompt_is_computed_by_the_next_one_if_the_first_ends() -> None:
    rig = Rig(prefill_chunk=50)
    (first,), (second,) = rig.add(200, seed=7), rig.add(200, seed=7)
    assert rig.step().admitted == [first]
    rig.step()
    rig.scheduler.finish(first)
    assert rig.plan().admitted == [second]
    assert second.cached_tokens == 100  # and the page that the first had in part


def _dealt(wishes: list[int], budget: int) -> list[int]:
    """The rule itself: one node each, round after round."""
    shares = [0] * len(wishes)
    while budget > 0 and shares != wishes:
        for i, wish in enumerate(wishes):
            if shares[i] < wish and budget > 0:
                shares[i] += 1
                budget -= 1
    return shares


@given(st.lists(st.integers(0, 70), max_size=20), st.integers(0, 300))
def test_fair_shares_are_round_robin(wishes: list[int], budget: int) -> None:
    assert fair_shares(wishes, budget) == _dealt(wishes, budget)
