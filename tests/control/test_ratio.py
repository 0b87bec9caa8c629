"""A ratio is observed over expected, shrunk to 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.inputs import Ratio

pairs = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=60)


@given(pairs)
def test_it_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    ratio = Ratio(5.0, (0.25, 1.7), 0.98)
    assert ratio.value == 1.0
    for expected, observed in seen:
        ratio.add(expected, observed)
        assert 0.25 <= ratio.value <= 1.7


@pytest.mark.parametrize("truth", [0.5, 1.0, 1.4])
def test_it_converges_and_follows_a_change(truth: float) -> None:
    ratio = Ratio(5.0, (0.25, 1.7), 0.98)
    for _ in range(400):
        ratio.add(1.0, truth)
    assert ratio.value == pytest.approx(truth, abs=0.06)
    for _ in range(400):
        ratio.add(1.0, 0.8)
    assert ratio.value == pytest.approx(0.8, abs=0.06)
