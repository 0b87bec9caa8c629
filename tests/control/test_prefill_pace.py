"""Prompt rows in steps with decoding sequences: as many as their objectives allow, and never zero for long."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.estimates.costs import CostTable
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.control.prefill_pace import DecodeLoad, PrefillPace, StepTimes

MOST = 192


def table(times: float = 1.0) -> CostTable:
    """A row costs 0.4 ms, the first one 6 ms more; 1000 tokens of context cost another 0.2 ms a row."""
    grid = [1, 8, 64, 256]
    return CostTable(grid, [0, 1000], [[times * (6 + (0.4 + c / 5000) * (r - 1)) for r in grid] for c in (0, 1000)])


def load(
    sequences: int = 4,
    target_ms: float = 80.0,
    n_output: int = 2 * PARAMS.new_answer_tokens,
    context: float = 0.0,
) -> DecodeLoad:
    found = DecodeLoad()
    for _ in range(sequences):
        found.add(1, context, target_ms, n_output)
    return found


def forward_ms(costs: CostTable, decodes: int, rows: int, context: float) -> float:
    return costs.ms(decodes + rows) + costs.ms(rows, context) - costs.ms(rows) if rows else costs.ms(decodes)


def teach(pace: PrefillPace, real: CostTable, decodes: int, rows: int, context: float, steps: int) -> None:
    ms = forward_ms(real, decodes, rows, context)
    every = rows * context / (decodes + rows)  # decoding sequences have none
    for _ in range(steps):
        pace.observe(StepTimes(decodes, decodes + rows, 0, every, context, 0.0, ms, 0.0))


def test_a_prompt_alone_gets_a_full_chunk() -> None:
    assert PrefillPace(table()).rows(DecodeLoad(), 1, 0, MOST) == MOST


@pytest.mark.parametrize("context", [0, 3000])
@pytest.mark.parametrize("target_ms", [15.0, 40.0, 80.0])
def test_a_chunk_is_the_longest_that_keeps_the_objective(target_ms: float, context: int) -> None:
    costs = table()
    rows = PrefillPace(costs).rows(load(target_ms=target_ms), 1, context, MOST)
    assert forward_ms(costs, 4, rows, context + rows / 2) <= target_ms
    assert rows == MOST or forward_ms(costs, 4, rows + 1, context + rows / 2) > target_ms
    assert rows > 0


def test_a_plan_without_a_further_prompt_saves_no_time_for_the_next() -> None:
    pace, tight = PrefillPace(table()), load(target_ms=1.0)
    rows = pace.rows(tight, 1, 0, MOST)
    assert pace.rows(tight, 0, 0, MOST) == 0  # the prompt ends in this step
    assert pace.rows(tight, 1, 0, MOST) == rows


def test_the_tightest_objective_counts() -> None:
    mixed = load(3)
    mixed.add(1, 0.0, 20.0, 100)
    tight = load(4, target_ms=20.0)
    assert PrefillPace(table()).rows(mixed, 1, 0, MOST) == PrefillPace(table()).rows(tight, 1, 0, MOST)


def test_a_recently_started_answer_is_slowed_little() -> None:
    costs = table()
    begun = load(n_output=PARAMS.new_answer_tokens - 1)
    rows = PrefillPace(costs).rows(begun, 1, 0, MOST)
    assert forward_ms(costs, 4, rows, rows / 2) <= PARAMS.new_answer_slowdown * costs.ms(4) + 1e-9
    assert 0 < rows < PrefillPace(costs).rows(load(), 1, 0, MOST)


def test_many_prompts_get_their_share_of_the_time_whatever_the_objective() -> None:
    costs = table()
    tight = {n: PrefillPace(costs).rows(load(target_ms=1.0), n, 0, MOST) for n in (1, 4, 40)}
    for prompts, rows in tight.items():
        share_ms = costs.ms(4) * prompts / 4
        assert forward_ms(costs, 4, rows, rows / 2) - costs.ms(4) == pytest.approx(share_ms, abs=0.6)
    assert tight[40] > tight[4] > tight[1]


def test_drafts_and_time_outside_the_forward_count() -> None:
    drafting, plain = PrefillPace(table()), PrefillPace(table())
    ms = table().ms(44)
    for _ in range(60):
        drafting.observe(StepTimes(4, 44, 40, 0.0, 0.0, 0.0, ms, 10.0))
    rows = drafting.rows(load(), 1, 0, MOST)
    assert forward_ms(table(), 44, rows, rows / 2) + 10.0 == pytest.approx(80.0, abs=1.0)
    assert rows < plain.rows(load(), 1, 0, MOST)


def test_bug_drafts_during_a_long_prompt_do_not_change_the_machines_speed() -> None:
    """Decoding sequences attend to their own context, with as many drafts as they have."""
    costs, pace = table(), PrefillPace(table())
    ms = costs.ms(44, 100) + costs.ms(236) - costs.ms(44) + costs.ms(192, 4096) - costs.ms(192)
    for _ in range(60):
        pace.observe(StepTimes(4, 236, 40, 4014.0, 4096.0, 100.0, ms, 0.0))
    rows = pace.rows(load(context=100.0), 1, 4096, MOST)
    assert 79.0 < costs.ms(44, 100) + forward_ms(costs, 44, rows, 4096 + rows / 2) - costs.ms(44) <= 80.0


def test_bug_one_long_pause_of_a_step_does_not_stop_prompts() -> None:
    pace = PrefillPace(table())
    usual = StepTimes(4, 4, 0, 0.0, 0.0, 0.0, table().ms(4), 2.0)
    for _ in range(60):
        pace.observe(usual)
    rows = pace.rows(load(), 1, 0, MOST)
    pace.observe(dataclasses.replace(usual, other_ms=2000.0))
    assert pace.rows(load(), 1, 0, MOST) >= 0.98 * rows


def test_bug_a_forward_of_zero_time_is_ignored() -> None:
    pace = PrefillPace(table())
    rows = pace.rows(load(), 1, 0, MOST)
    pace.observe(StepTimes(4, 4))
    assert pace.rows(load(), 1, 0, MOST) == rows


@given(st.integers(1, 64), st.integers(1, 40), st.floats(0.1, 200.0), st.integers(0, 8000), st.floats(1.0, 8.0))
def test_a_prompt_never_waits_for_a_row_for_long(
    sequences: int, prompts: int, target_ms: float, context: int, times: float
) -> None:
    """Time that is too short for a row accumulates until there is one."""
    pace, costs = PrefillPace(table(times)), table(times)
    decodes = load(sequences, target_ms)
    row_ms = costs.ms(sequences + 1) - costs.ms(sequences) + costs.ms(1, context + 0.5) - costs.ms(1)
    wait = 1 + int(row_ms * sequences / (prompts * costs.ms(sequences)) + 1e-6)
    assert any(pace.rows(decodes, prompts, context, MOST) for _ in range(wait))


@pytest.mark.parametrize("times", [0.5, 1.0, 3.0])
def test_a_machine_slower_than_measured_is_learned(times: float) -> None:
    pace, real = PrefillPace(table()), table(times)
    for _ in range(25):
        teach(pace, real, 4, pace.rows(load(), 1, 500, MOST), 500.0, 1)
    rows = pace.rows(load(), 1, 500, MOST)
    assert forward_ms(real, 4, rows, 500.0) == pytest.approx(80.0, rel=0.12) or rows == MOST


def test_a_guess_is_replaced_by_observations() -> None:
    pace, real = PrefillPace(CostTable.guess(256)), table(2.0)
    teach(pace, real, 0, 192, 96.0, 3)
    teach(pace, real, 4, 0, 0.0, 20)
    for _ in range(12):
        teach(pace, real, 4, pace.rows(load(), 1, 0, MOST), 0.0, 1)
    assert forward_ms(real, 4, pace.rows(load(), 1, 0, MOST), 0.0) == pytest.approx(80.0, rel=0.12)


def test_bug_a_guess_ignores_a_first_forward_that_warmed_up() -> None:
    pace, real = PrefillPace(CostTable.guess(256)), table(0.5)
    teach(pace, table(20.0), 4, 0, 0.0, 1)
    teach(pace, real, 4, 0, 0.0, 23)
    for _ in range(12):
        teach(pace, real, 4, pace.rows(load(target_ms=40.0), 1, 0, MOST), 0.0, 1)
    rows = pace.rows(load(target_ms=40.0), 1, 0, MOST)
    assert forward_ms(real, 4, rows, 0.0) == pytest.approx(40.0, rel=0.12)


def test_bug_a_padded_forward_measured_faster_over_a_longer_context_is_learned_from() -> None:
    costs = CostTable([1, 8, 64], [64, 1024], [[10.0, 10.0, 20.0], [9.5, 9.5, 19.0]], sizes=(8, 64))
    pace = PrefillPace(costs)
    for _ in range(300):
        pace.observe(StepTimes(1, 1, 0, 64, 0, 64, forward_ms=1.0))  # much faster than measured
        pace.observe(StepTimes(1, 60, 0, 64, 64, 64, forward_ms=100.0))
        pace.observe(StepTimes(1, 8, 0, 1024, 1024, 1024, forward_ms=1.0))
    assert pace.rows(load(), 1, 1024, MOST) > 0
