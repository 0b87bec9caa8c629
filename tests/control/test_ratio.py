"""A ratio is observed over expected, shrunk to what is known already."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.state import Ratio, Skill, trust_ratio

pairs = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), max_size=60)


@given(pairs)
def test_it_stays_within_its_bounds(seen: list[tuple[float, float]]) -> None:
    ratio = Ratio(5.0, 0.25, 1.7)
    assert ratio.value == 1.0
    for expected, observed in seen:
        ratio.add(expected, observed)
        assert 0.25 <= ratio.value <= 1.7


@pytest.mark.parametrize("truth", [0.5, 1.0, 1.4])
def test_it_finds_the_truth_and_follows_a_change(truth: float) -> None:
    ratio = Ratio(5.0, 0.25, 1.7)
    for _ in range(400):
        ratio.add(1.0, truth)
    assert ratio.value == pytest.approx(truth, abs=0.06)
    for _ in range(400):
        ratio.add(1.0, 0.8)
    assert ratio.value == pytest.approx(0.8, abs=0.06)


def test_a_new_sequence_starts_from_what_all_of_them_showed() -> None:
    pool = trust_ratio()
    first = trust_ratio(pool)
    for _ in range(300):
        first.add(0.2, 0.1)
    later = trust_ratio(pool)
    assert later.value == pytest.approx(pool.value)
    assert later.value < 0.7
    for _ in range(300):
        later.add(1.0, 1.0)
    assert later.value > 0.9
    assert first.value < 0.75, "its own word counts for more than the others'"


def test_finding_and_following_are_two_skills() -> None:
    skill = Skill()
    for _ in range(50):
        skill.first.add(0.5, 0.0)
        skill.deep.add(0.5, 0.5)
    assert skill.factor(first=True) < 0.5
    assert skill.factor(first=False) == pytest.approx(1.0)
