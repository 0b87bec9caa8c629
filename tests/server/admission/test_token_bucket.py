"""Rates over any schedule, against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.admission import TokenBucket

STEPS = st.lists(st.tuples(st.floats(0, 30), st.floats(0, 50)), max_size=40)


@given(per_minute=st.floats(0.1, 1000), steps=STEPS)
def test_over_any_period_at_most_a_burst_plus_the_rate_is_admitted(
    per_minute: float, steps: list[tuple[float, float]]
) -> None:
    bucket, now, taken, last = TokenBucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for pause, amount in steps:
        now += pause
        if bucket.wait_s(now) == 0:
            bucket.take(amount, now)
            taken, last = taken + amount, amount
    # The last one may exceed the limit; those before it were admitted within it.
    assert taken - last <= max(1.0, per_minute) + per_minute * now / 60 + 1e-6


@given(per_minute=st.floats(0.1, 1000), overdrawn=st.floats(0, 2000))
def test_after_the_returned_wait_exactly_one_more_is_admitted(per_minute: float, overdrawn: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(max(1.0, per_minute) + overdrawn, 0.0)
    wait = bucket.wait_s(0.0)
    assert wait == pytest.approx((1 + overdrawn) * 60 / per_minute)
    assert bucket.wait_s(wait * 0.99) > 0
    assert bucket.wait_s(wait * 1.001 + 1e-9) == 0


def test_a_change_of_the_rate_keeps_the_used_tokens() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90, 0.0)
    bucket.change(6, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(310)
    bucket.change(600, 10.0)
    assert bucket.wait_s(10.0) == pytest.approx(3.0)
    full = TokenBucket(600, 0.0)
    full.change(2, 0.0)
    for _ in range(2):
        assert full.wait_s(0.0) == 0
        full.take(1, 0.0)
    assert full.wait_s(0.0) > 0  # a burst is not larger than the new rate allows
