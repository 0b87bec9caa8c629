"""Small scenarios whose times follow from the costs by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from cluster.plan.arrivals import PlannedRequest, Traffic, drawn_requests
from cluster.plan.profile import Overheads
from cluster.plan.simulate import FleetPlan, simulate
from specdec.load.arrivals import Arrivals
from specdec.load.request import Record
from tests.cluster.plan.profiles import asked, forward_ms, profile


def alone(*requests: PlannedRequest, **given: object) -> list[Record]:
    """Return the results of ``requests`` on one replica."""
    return simulate(FleetPlan(profile(**given), 1), requests).records  # type: ignore[arg-type]


def test_one_request() -> None:
    (record,) = alone(asked(1.0, 100, 5))
    assert record.ok
    assert record.ttft_ms == pytest.approx(forward_ms(100))
    assert record.tpot_ms == pytest.approx(forward_ms(1))
    assert (record.output_tokens, record.cached_tokens) == (5, 0)


def test_a_long_prompt_takes_a_step_for_each_chunk() -> None:
    (record,) = alone(asked(0.0, 400, 1))  # 192, 192, and 15 before the pending one
    assert record.ttft_ms == pytest.approx(2 * forward_ms(192) + forward_ms(16))


def test_overheads_are_added_to_steps_and_to_the_first_tokens() -> None:
    overheads = Overheads(step_ms=1.0, step_ms_per_sequence=0.5, request_ms=7.0)
    (record,) = alone(asked(0.0, 100, 3), overheads=overheads)
    assert record.ttft_ms == pytest.approx(7.0 + 1.5 + forward_ms(100))
    assert record.tpot_ms == pytest.approx(1.5 + forward_ms(1))


def test_drafts_add_tokens_and_cost_rows_and_time() -> None:
    (record,) = alone(asked(0.0, 1, 9), drafted=[(4, 3)])
    # Three steps of three tokens; each drafts 4 nodes for 2 ms, the last no more than it may still emit.
    assert record.chunk_s == pytest.approx([(2 + forward_ms(5)) / 1e3 * n for n in (1, 2)] + [record.end_s])
    assert record.e2e_ms == pytest.approx(3 * 2 + 2 * forward_ms(5) + forward_ms(3))


def test_two_requests_share_a_prefix() -> None:
    first, second, other = alone(
        asked(0.0, 257, 1, "a", "b", "c", "d"), asked(1.0, 280, 1, "a", "b", "c", "d"), asked(2.0, 257, 1, "x", "b")
    )
    assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 256, 0)
    assert second.ttft_ms == pytest.approx(forward_ms(280 - 256))
    assert other.ttft_ms == pytest.approx(forward_ms(192) + forward_ms(65))


def test_two_simultaneous_requests_decode_in_one_batch() -> None:
    first, second = alone(asked(0.0, 1, 10), asked(0.0, 1, 10))
    # The second arrived after the first one's step had started, and waits for its end.
    assert first.e2e_ms == pytest.approx(forward_ms(1) + 9 * forward_ms(2))
    assert second.e2e_ms == pytest.approx(forward_ms(1) + 9 * forward_ms(2) + forward_ms(1))


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_a_queue_with_equal_services(load: float) -> None:
    # M/D/1: one request at a time, each of two steps of 10 ms.
    service_s = 0.020
    requests = drawn_requests(Arrivals(load / service_s, 100.0), Traffic(1, 2, spread=False), seed=0)
    run = simulate(FleetPlan(profile(max_batch=1, max_queued_requests=10_000), 1), requests)
    waits = [record.e2e_ms / 1e3 - service_s for record in run.answered]
    expected = [0.0]  # by Lindley's recursion, for these very arrivals
    for before, after in pairwise(requests):
        expected.append(max(0.0, expected[-1] + service_s - (after.at_s - before.at_s)))
    assert waits == pytest.approx(expected, abs=1e-6)
    # And on the whole as Pollaczek and Khinchin have it, as far as some thousand arrivals are like all.
    assert sum(waits) / len(waits) == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.15)


def test_a_deadline_cuts_an_answer_short() -> None:
    request = PlannedRequest(0.0, 1, 100, deadline_s=0.25)
    (record,) = alone(request)
    assert record.outcome == "cut"
    assert record.output_tokens == math.ceil(250 / forward_ms(1))


def test_a_too_large_request_is_rejected_like_on_a_server() -> None:
    long, *others = alone(asked(0.0, 4000, 1), *(asked(0.001 * n, 100, 50) for n in range(1, 9)), max_queued_tokens=250)
    assert (long.outcome, long.error) == ("refused", "PromptTooLongError")
    refused = [record for record in others if record.outcome == "refused"]
    assert {record.error for record in refused} == {"TokenQueueFullError"}
    assert 0 < len(refused) < len(others)


def test_a_full_queue_rejects() -> None:
    requests = [asked(0.001 * n, 1, 50) for n in range(8)]
    records = alone(*requests, max_batch=1, max_queued_requests=3)
    assert [record.error for record in records if not record.ok] == ["QueueFullError"] * 4
