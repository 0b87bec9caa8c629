"""Tiers contain the requested steps, and are few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.estimates.costs import CostTable
from specdec.models.device_step import StepTiers

TIERS = StepTiers(12, 300, 200, 1029)


@given(st.integers(1, 12), st.integers(1, 300), st.integers(0, 200), st.integers(1, 1029))
def test_a_tier_contains_its_step(entries: int, rows: int, samples: int, pages: int) -> None:
    tier = TIERS.of(entries, rows, samples, pages)
    assert (tier.samples == 0) == (samples == 0)  # no row is sampled if none is wanted
    assert entries <= tier.entries <= min(12, 2 * entries)
    assert rows <= tier.rows <= min(300, 2 * rows)
    assert samples <= tier.samples <= min(200, 2 * samples)
    assert pages <= tier.pages <= 1029
    assert TIERS.of(tier.entries, tier.rows, tier.samples, tier.pages) == tier


@given(st.integers(1, 300))
def test_the_controller_prices_the_rows_of_a_tier(rows: int) -> None:
    table = CostTable([1, 300], [0], [[1.0, 300.0]], sizes=TIERS.rows)
    assert table.ms(rows) == pytest.approx(TIERS.of(1, rows, 1, 1).rows)


def test_tiers_are_few() -> None:
    found = {TIERS.of(1, rows, rows, 1) for rows in range(1, 201)}
    assert len(found) <= 12
    assert TIERS.largest == TIERS.of(12, 300, 200, 1029)
    assert len({TIERS.of(1, 1, 1, pages) for pages in range(1, 1030)}) == 2


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("entries", (13, 1, 1, 1)), ("rows", (1, 301, 1, 1)), ("logit_rows", (1, 1, 201, 1)), ("pages", (1, 1, 1, 1030))],
)
def test_a_too_large_step_is_named(name: str, sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        TIERS.of(*sizes)
