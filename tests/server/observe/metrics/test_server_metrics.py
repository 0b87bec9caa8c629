"""What is counted of requests, call by call and event by event, with the test's own clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.observe.metrics import Histogram, ServerMetrics
from server.observe.records import CallRecord, RequestRecord
from server.prometheus import by_position
from specdec.core.types import (
    Delta,
    DrafterStats,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationStats,
    Started,
    StoppingParams,
    Timings,
    Usage,
)
from specdec.engine.engine import count_power
from specdec.errors import QueueFullError


def count(histogram: Histogram) -> float:
    """The number of values."""
    _, below = histogram.buckets()[-1]
    return below


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_record(
    metrics: ServerMetrics,
    clock: Clock,
    call: CallRecord | None = None,
    n: int = 1,
    max_tokens: int | None = 9,
    target_tpot_ms: float | None = None,
) -> RequestRecord:
    stopping = StoppingParams(max_tokens=max_tokens)
    request = Request("r", (1, 2, 3), SamplingParams(n=n), stopping, target_tpot_ms=target_tpot_ms)
    return RequestRecord(request, call, metrics, metrics.request_ended, clock=clock)


def make_finished(index: int, tokens: int, reason: FinishReason = FinishReason.EOS) -> Finished:
    stats = SpeculationStats(4, 3, 9, 3, [1, 1, 1], {"suffix": DrafterStats(6, 2), "model": DrafterStats(5, 1)})
    return Finished("r", index, reason, None, Usage(3, 2, tokens, 1, 5, 6, 7), stats, Timings(250, 500, 750, 1, 2))


def test_latencies_are_measured_at_event_arrival() -> None:
    metrics, clock = ServerMetrics(), Clock()
    call = CallRecord("http", "/x", "id", 99.5, 0.0)
    record = make_record(metrics, clock, call, n=2)
    record.saw(Started("r", 1, 3, 2, 250.0))
    for now, index, ids in ((101.0, 0, [1]), (101.5, 1, [1, 2]), (102.0, 0, [2, 3, 4]), (102.25, 0, [])):
        clock.now = now
        record.saw(Delta("r", index, ids, "x"))
    clock.now = 103.0
    record.saw(make_finished(0, 4))
    record.saw(make_finished(1, 2, FinishReason.LENGTH))
    record.ended(complete=True)
    assert (count(metrics.ttft), metrics.ttft.total) == (1, 1.5)  # from the call's begin, once for all samples
    assert (count(metrics.gap), metrics.gap.total) == (1, 1.0)  # within a sample, and only for events with tokens
    assert (count(metrics.tpot), metrics.tpot.total) == (2, 1.0 / 3 + 0.0)
    assert (count(metrics.queue), metrics.queue.total) == (1, 0.25)
    assert (count(metrics.e2e), metrics.e2e.total) == (1, 3.5)
    assert (metrics.prefill.total, metrics.decode.total) == (1.0, 1.5)
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens) == (3, 2, 6)
    assert metrics.requests == {"complete": 1, "failed": 0, "left": 0}
    assert {r: n for r, n in metrics.finished.items() if n} == {"eos": 1, "length": 1}
    assert (metrics.preemptions, metrics.pauses) == (2, 14)
    by_drafter = {"suffix": DrafterStats(12, 4), "model": DrafterStats(10, 2)}
    assert metrics.stats == SpeculationStats(8, 6, 18, 6, [2, 2, 2], by_drafter)
    assert (record.output_tokens, record.ttft_s) == (6, 1.5)


def test_bug_tokens_of_another_engine_were_counted_as_generated_here() -> None:
    metrics, clock = ServerMetrics(), Clock()
    record = make_record(metrics, clock)
    record.saw(Delta("r", 0, [4, 5, 6], "abc"))
    end = make_finished(0, 8)
    end.usage.resumed_tokens = 5
    record.saw(end)
    assert metrics.request_output.total == metrics.output_tokens == 3


def test_requests_of_a_session_are_measured_from_their_own_start() -> None:
    metrics, clock = ServerMetrics(), Clock()
    record = make_record(metrics, clock, CallRecord("grpc", "S", "id", 10.0, 0.0, many=True))
    clock.now = 101.0
    record.saw(Delta("r", 0, [1], "x"))
    assert metrics.ttft.total == 1.0


def test_later_requests_of_a_call_are_measured_from_their_own_start() -> None:
    """They may have waited for earlier ones."""
    metrics, clock = ServerMetrics(), Clock()
    call = CallRecord("http", "/x", "id", 99.5, 0.0)
    for began_s in (100.0, 110.0):
        clock.now = began_s
        record = make_record(metrics, clock, call)
        call.requests.append(record)
        clock.now = began_s + 1.0
        record.saw(Delta("r", 0, [1], "x"))
        record.ended(complete=True)
    assert (count(metrics.ttft), metrics.ttft.total) == (count(metrics.e2e), metrics.e2e.total) == (2, 1.5 + 1.0)


def test_how_requests_end() -> None:
    metrics, clock = ServerMetrics(), Clock()
    make_record(metrics, clock).ended(complete=False)
    failed = make_record(metrics, clock)
    failed.error = QueueFullError(1, 1.0)
    failed.ended(complete=True)
    make_record(metrics, clock).ended(complete=True)
    aborted = make_record(metrics, clock, n=2)  # or superseded
    aborted.saw(make_finished(0, 4))
    aborted.saw(make_finished(1, 2, FinishReason.ABORTED))
    aborted.ended(complete=True)
    assert metrics.requests == {"complete": 1, "failed": 1, "left": 2}
    assert count(metrics.e2e) == 1


@pytest.mark.parametrize(
    ("gap_s", "target_tpot_ms", "reason", "good", "missed"),
    [
        (0.05, None, FinishReason.EOS, 4, set()),
        (0.15, None, FinishReason.EOS, 0, {"time_per_output_token"}),  # the engine's objective
        (0.15, 200.0, FinishReason.LENGTH, 4, set()),
        (0.05, 20.0, FinishReason.EOS, 0, {"time_per_output_token"}),
        (0.05, None, FinishReason.DEADLINE, 0, {"deadline"}),
        (0.15, None, FinishReason.DEADLINE, 0, {"time_per_output_token", "deadline"}),
        (0.15, None, FinishReason.ABORTED, 0, set()),  # superseded
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(
    gap_s: float, target_tpot_ms: float | None, reason: FinishReason, good: int, missed: set[str]
) -> None:
    metrics, clock = ServerMetrics(target_tpot_ms=100.0), Clock()
    record = make_record(metrics, clock, target_tpot_ms=target_tpot_ms)
    for _ in range(4):
        record.saw(Delta("r", 0, [1], "x"))
        clock.now += gap_s
    record.saw(make_finished(0, 4, reason))
    record.ended(complete=True)
    assert (metrics.good_requests, metrics.good_tokens) == (good // 4, good)
    assert {objective for objective, count in metrics.missed.items() if count} == missed


def test_a_failed_or_cancelled_request_is_not_goodput() -> None:
    metrics, clock = ServerMetrics(), Clock()
    failed = make_record(metrics, clock)
    failed.error = QueueFullError(1, 1.0)
    failed.ended(complete=True)
    make_record(metrics, clock).ended(complete=False)
    assert (metrics.good_requests, sum(metrics.missed.values())) == (0, 0)


@given(st.lists(st.integers(1, 256), max_size=40))
def test_power_of_two_counts_become_a_histogram(values: list[int]) -> None:
    counts, whole = list[int](), Histogram([2**k for k in range(9)])
    for value in values:
        count_power(counts, value)
        whole.add(value)
    exported = Histogram.by_powers(counts, 8, sum(values))
    assert (exported.buckets(), count(exported), exported.total) == (whole.buckets(), len(values), sum(values))


def test_calls_and_errors() -> None:
    metrics = ServerMetrics()
    for status, reason in (("200", ""), ("200", ""), ("429", "QUEUE_FULL")):
        call = CallRecord("http", "/v1/completions", "id", 1.0, 0.0)
        metrics.call_began(call)
        assert metrics.calls_open == 1
        call.status, call.reason, call.ended_s = status, reason, 1.5
        metrics.call_ended(call)
    assert metrics.calls_open == 0
    assert metrics.calls == {("http", "/v1/completions", "200"): 2, ("http", "/v1/completions", "429"): 1}
    assert metrics.refusals == {"QUEUE_FULL": 1}
    assert metrics.call_time.total == 1.5


@given(st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=6))
def test_accepted_per_position_is_a_count_of_steps(histograms: list[list[int]]) -> None:
    metrics, clock = ServerMetrics(), Clock()
    record = make_record(metrics, clock)
    for index, histogram in enumerate(histograms):
        finished = make_finished(index, 1)
        finished.stats.acceptance_histogram = histogram
        record.saw(finished)
    steps = [accepted for histogram in histograms for accepted, n in enumerate(histogram) for _ in range(n)]
    longest = max((len(h) for h in histograms), default=1)
    assert [*by_position(metrics.stats).values()] == [sum(a > k for a in steps) for k in range(max(0, longest - 1))]
