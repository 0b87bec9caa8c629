"""The machine's speed in two components: several sizes of forwards identify them, one size does not."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.estimates.costs import MachineSpeed
from specdec.control.params import DEFAULT_PARAMS as PARAMS

FIRST, ROW = 60.0, 2.0  # milliseconds on the grid


def expected(speed: MachineSpeed, rows: int) -> float:
    more = ROW * (rows - 1)
    return FIRST + more + speed.reading * FIRST + speed.rows * more


def watch(speed: MachineSpeed, rows: int, took: float) -> None:
    guess = expected(speed, rows)
    speed.observe(FIRST, ROW * (rows - 1), guess, max(-0.25, min(0.25, math.log(took / guess))))


@pytest.mark.parametrize(("reading", "rows"), [(0.5, 0.0), (0.0, 0.5), (-0.3, 0.4), (0.4, 0.4)])
def test_forwards_of_several_sizes_separate_the_two(reading: float, rows: float) -> None:
    rng, speed = random.Random(1), MachineSpeed()
    for _ in range(300):
        n = rng.choice((1, 8, 20, 40))
        watch(speed, n, (FIRST * (1 + reading) + ROW * (n - 1) * (1 + rows)) * rng.lognormvariate(0, 0.03))
    assert speed.reading == pytest.approx(reading, abs=0.06)
    assert speed.rows == pytest.approx(rows, abs=0.12)


def test_bug_a_machine_that_slows_down_while_drafting_does_not_overstate_the_cost_of_plain_decoding() -> None:
    """All forwards have 20 rows, and everything takes 1.3 times as long. Were all of it put down to reading weights,
    8 rows would seem to take 103 ms; they take 96."""
    speed = MachineSpeed()
    for _ in range(40):
        watch(speed, 20, 1.3 * (FIRST + 19 * ROW))
    assert expected(speed, 20) == pytest.approx(1.3 * (FIRST + 19 * ROW), rel=0.02)
    assert expected(speed, 8) == pytest.approx(1.3 * (FIRST + 7 * ROW), rel=0.04)


def test_bug_a_slow_period_before_drafting_does_not_make_rows_look_free() -> None:
    """8 rows take 1.4 times as long for a while, then 16 take as long as on the grid, and so would 8. If a slow period
    counted as slower reading alone, the time that 16 rows no longer take would reduce the cost of a row."""
    speed = MachineSpeed()
    for _ in range(12):
        watch(speed, 8, 1.4 * (FIRST + 7 * ROW))
    assert expected(speed, 16) - expected(speed, 8) == pytest.approx(1.4 * 8 * ROW, rel=0.08)
    for _ in range(20):
        watch(speed, 16, FIRST + 15 * ROW)
    assert expected(speed, 16) - expected(speed, 8) == pytest.approx(8 * ROW, rel=0.08)
    assert expected(speed, 8) == pytest.approx(FIRST + 7 * ROW, rel=0.012)


def test_estimates_without_observations_return_to_the_grid() -> None:
    speed = MachineSpeed()
    for _ in range(200):
        watch(speed, 40, FIRST + 39 * ROW * 1.5)
        watch(speed, 1, FIRST)
    before = speed.rows
    assert before > 0.3
    for _ in range(1000):
        watch(speed, 1, FIRST)
    assert abs(speed.rows) < 0.25 * before


@given(st.lists(st.tuples(st.floats(1e-3, 1e4), st.floats(0, 1e6), st.floats(-0.25, 0.25)), max_size=80))
def test_no_observation_breaks_it(seen: list[tuple[float, float, float]]) -> None:
    speed = MachineSpeed()
    for first, more, surprise in seen:
        guess = first + more + speed.reading * first + speed.rows * more
        speed.observe(first, more, max(guess, 0.2 * (first + more)), surprise)
        assert PARAMS.min_speed <= speed.reading <= PARAMS.max_speed
        assert PARAMS.min_speed <= speed.rows <= PARAMS.max_speed
        assert speed._var_reading > 0 < speed._var_rows
        assert speed._covariance**2 <= speed._var_reading * speed._var_rows * (1 + 1e-9)
