"""Counting by buckets, against counting one by one."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from server.observe.metrics import CHUNK_BUCKETS, LATENCY_BUCKETS_S, SAMPLE_BUCKETS, TOKEN_BUCKETS, Histogram

VALUES = st.lists(st.one_of(st.sampled_from(LATENCY_BUCKETS_S), st.floats(0, 1000)), max_size=40)


@given(VALUES)
def test_a_bucket_counts_values_up_to_its_bound(values: list[float]) -> None:
    histogram = Histogram(LATENCY_BUCKETS_S)
    for value in values:
        histogram.add(value)
    found = histogram.buckets()
    assert [float(bound) for bound, _ in found] == [*LATENCY_BUCKETS_S, math.inf]
    assert [count for _, count in found] == [
        sum(v <= bound for v in values) for bound in (*LATENCY_BUCKETS_S, math.inf)
    ]
    assert math.isclose(histogram.total, sum(values), abs_tol=1e-9)


def test_bounds_increase_from_below_a_millisecond_to_above_ten_minutes() -> None:
    for bounds in (LATENCY_BUCKETS_S, TOKEN_BUCKETS, CHUNK_BUCKETS, SAMPLE_BUCKETS):
        assert list(bounds) == sorted(set(bounds))
    assert sum(bound < 1e-3 for bound in LATENCY_BUCKETS_S) >= 2
    assert LATENCY_BUCKETS_S[-1] > 600  # Prometheus reports the last bound for any quantile above it
