"""The cost table: never falling with rows, calm about outliers, quick to follow the machine, able to learn a shape."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.estimates.costs import CostTable

ROWS = (1, 2, 4, 8, 16, 32, 64)
positive = st.floats(1e-3, 1e4)
observations = st.lists(
    st.tuples(st.integers(0, 200), st.floats(0, 5000), st.floats(-1, 1e6, allow_subnormal=False)), max_size=60
)


def flat(ms: float = 10.0, slope: float = 0.02) -> CostTable:
    return CostTable(ROWS, [0], [[ms * (1 + slope * (rows - 1)) for rows in ROWS]])


@given(
    st.lists(st.lists(positive, min_size=len(ROWS), max_size=len(ROWS)), min_size=2, max_size=2),
    observations,
    st.floats(0, 4000),
)
def test_costs_never_decrease_with_rows_whatever_is_observed(
    ms: list[list[float]], seen: list[tuple[int, float, float]], context: float
) -> None:
    table = CostTable(ROWS, [64, 1024], ms)
    for rows, at, took in seen:
        table.observe(rows, at, took)
    predicted = [table.ms(rows, context) for rows in range(1, 100)]
    assert all(np.isfinite(predicted))
    assert predicted[0] > 0
    assert all(more >= less for less, more in itertools.pairwise(predicted))
    for rows in (1, 2, 3, 33, 63, 64, 80):
        for more in (0, 1, 7, 40, 200):
            span = table.span(rows, more, context)
            assert len(span) == max(1, min(rows + more, 64) - rows + 1)
            assert span == pytest.approx(predicted[rows - 1 : rows - 1 + len(span)])


def test_noise_in_the_measured_grid_never_makes_more_rows_cheaper() -> None:
    table = CostTable([1, 2, 4], [0], [[12.0, 9.0, 10.0]])
    assert [table.ms(rows) for rows in (1, 2, 4)] == pytest.approx([9.0, 9.0, 10.0])


def test_an_occasional_spike_changes_predictions_little() -> None:
    rng, table = random.Random(1), flat()
    for step in range(300):
        took = 10.0 * rng.lognormvariate(0, 0.03)
        table.observe(1, 0, took * 10 if step >= 20 and step % 12 == 0 else took)
        if step >= 40:
            assert 9.0 < table.ms(1) < 11.5


@pytest.mark.parametrize("factor", [2.0, 0.6])
def test_a_lasting_change_of_speed_is_followed_soon(factor: float) -> None:
    """Memory becomes slower or faster: the cost of reading the weights changes for every forward, whatever its rows."""
    table, change = flat(), (factor - 1) * flat().ms(1)
    for _ in range(30):
        table.observe(4, 0, flat().ms(4))
    for _ in range(18):
        table.observe(4, 0, flat().ms(4) + change)
    for rows in (1, 4, 16, 64):
        assert table.ms(rows) == pytest.approx(flat().ms(rows) + change, rel=0.2)


def test_a_forward_that_does_not_run_follows_the_speed_of_one_that_does() -> None:
    """Memory becomes slower for both, then faster while only one is timed."""
    table, idle = flat(), flat(3.0)
    for _ in range(40):
        table.observe(1, 0, 1.5 * flat().ms(1))
        idle.observe(1, 0, 1.8 * flat(3.0).ms(1))
    dearer = idle.ms(1) / table.ms(1)
    for _ in range(40):
        before = table.slowdown
        table.observe(1, 0, flat().ms(1))
        idle.follow(before, table.slowdown)
    assert table.ms(1) == pytest.approx(flat().ms(1), rel=0.1)
    assert idle.ms(1) / table.ms(1) == pytest.approx(dearer)
    assert idle.ms(64) > idle.ms(1)


def test_contexts_are_interpolated_and_extrapolated_in_proportion() -> None:
    table = CostTable([1, 8], [0, 1024], [[10.0, 12.0], [20.0, 32.0]])
    assert table.ms(1, 512) == pytest.approx(15.0)
    assert table.ms(8, 512) == pytest.approx(22.0)
    assert table.ms(1, 4096) == pytest.approx(50.0)
    assert table.ms(8, 4096) == pytest.approx(92.0)


def test_a_context_below_the_grid_costs_as_much_as_its_first_point() -> None:
    table = CostTable([1, 8], [512, 1024], [[10.0, 12.0], [20.0, 32.0]])
    assert table.ms(1, 0) == pytest.approx(10.0)


def test_a_grid_whose_cost_falls_with_context_is_not_extrapolated_below_its_last_point() -> None:
    table = CostTable([1], [0, 1024], [[10.0], [9.0]])
    assert table.ms(1, 100_000) == pytest.approx(9.0)


def test_rows_beyond_the_grid_cost_in_proportion() -> None:
    assert flat().ms(640) == pytest.approx(10 * flat().ms(64))


def test_observations_correct_a_guess() -> None:
    table = CostTable.guess(256)
    for _ in range(20):
        table.observe(1, 0, 60.0)
    assert table.ms(1) == pytest.approx(60.0, rel=0.1)


def test_bug_the_first_observation_almost_replaces_a_guess() -> None:
    table = CostTable.guess(256)
    table.observe(1, 0, 60.0)
    assert table.ms(1) == pytest.approx(60.0, rel=0.25)


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_a_guess_covers_every_number_of_rows(rows: int) -> None:
    table = CostTable.guess(rows)
    assert 0 < table.ms(1) <= table.ms(rows)


def test_plain_values_give_the_same_table_without_learned_corrections() -> None:
    table = flat()
    again = CostTable.from_dict(table.as_dict())
    table.observe(1, 0, 50.0)
    assert CostTable.from_dict(table.as_dict()).ms(3) == again.ms(3) == flat().ms(3)


def test_plain_values_of_a_corrected_guess_are_those_of_a_measured_table() -> None:
    table = CostTable.guess(256)
    table.observe(1, 0, 60.0)
    again = CostTable.from_dict(table.as_dict())
    assert again.known
    again.observe(1, 0, 600.0)
    assert again.ms(1) < 80.0


@pytest.mark.parametrize(
    ("rows", "contexts", "ms"),
    [
        ([1, 1], [0], [[1.0, 1.0]]),
        ([2, 1], [0], [[1.0, 1.0]]),
        ([1, 2], [8, 8], [[1.0, 1.0]] * 2),
        ([1, 2], [0], [[1.0, 0.0]]),
        ([1, 2], [0], [[1.0]]),
        ([1, 2], [0], [[1.0, float("nan")]]),
    ],
)
def test_an_invalid_grid_is_rejected(rows: list[int], contexts: list[int], ms: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="must"):
        CostTable(rows, contexts, ms)
    with pytest.raises(ValueError, match="sizes: must rise"):
        CostTable([1, 2], [0], [[1.0, 1.0]], sizes=(1, 2, 2))


def test_bug_a_spike_in_the_first_step_changes_a_measured_table_little() -> None:
    table = flat()
    table.observe(1, 0, 100.0)
    assert table.ms(1) < 13.0


SIZES = (1, 2, 4, 8, 24, 64)


@given(st.integers(1, 64), st.integers(0, 70), st.floats(0, 3000))
def test_padded_forwards_cost_as_much_as_those_of_the_next_size(rows: int, more: int, context: float) -> None:
    grid = [[10.0 + c / 100 + n / 4 for n in ROWS] for c in (0, 1024)]
    plain = CostTable(ROWS, [0, 1024], grid)
    padded = CostTable.from_dict(CostTable(ROWS, [0, 1024], grid, sizes=SIZES).as_dict())
    for table in (plain, padded):
        table.observe(10, context, 30.0)
    plain.observe(24, context, 40.0)
    padded.observe(9, context, 40.0)
    sizes = [next(size for size in SIZES if size >= n) for n in range(rows, min(rows + more, 64) + 1)]
    same = CostTable(ROWS, [0, 1024], grid)
    same.observe(24, context, 30.0)
    same.observe(24, context, 40.0)
    assert padded.span(rows, more, context) == pytest.approx([same.ms(size, context) for size in sizes])
    assert padded.ms(rows, context) == pytest.approx(same.ms(sizes[0], context))
    assert padded.row_ms(rows, context) == pytest.approx(same.row_ms(rows, context))


def test_the_price_of_a_row_is_that_of_the_next_four() -> None:
    table = CostTable([1, 9, 13], [0], [[10.0, 18.0, 30.0]], sizes=(1, 13))
    assert [table.row_ms(rows) for rows in (1, 7, 9)] == pytest.approx([1.0, 2.0, 3.0])


def test_a_span_may_start_below_the_measurements_and_ends_with_them() -> None:
    table = CostTable([4, 8], [0], [[12.0, 20.0]])
    assert table.span(1, 1) == [12.0, 12.0]
    assert table.span(2, 4) == pytest.approx([12.0, 12.0, 12.0, 14.0, 16.0])
    assert table.span(7, 9) == pytest.approx([18.0, 20.0])
    assert table.span(8, 3) == pytest.approx([20.0])
    assert table.span(16, 3) == pytest.approx([40.0])
