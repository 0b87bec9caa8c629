"""Made-up experiments hold whole units and no difference but the planted one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binom

from server.experiment.analysis import power
from server.experiment.analysis.power import Redraw, plan_size
from server.experiment.config import MetricTarget, Stopping
from server.experiment.stats.quantiles import MIN_UNITS
from server.experiment.stats.samples import Interval, TwoArmSample
from tests.server.experiment.samples import paired_sample
from tests.server.experiment.simulated import manifest, paired, switchback


def test_pairs_stay_together_and_a_bias_of_the_capture_is_removed() -> None:
    rng = np.random.default_rng(1)
    a = np.arange(1.0, 101.0)
    drawn = Redraw(paired_sample(a, a + 1000)).draw(2000, 0.5, rng)
    first, second = (values[np.argsort(units)] for values, units in zip(drawn.values, drawn.units, strict=True))
    assert drawn.n_units == len(first) == len(second) == 2000
    assert np.all(np.abs(first - second / 0.5) == 1000)
    assert 0.45 < np.mean(first > 1000) < 0.55


def test_units_with_several_values_are_drawn_whole() -> None:
    values = np.array([1.0, 1.0, 2.0, 3.0, 3.0, 3.0])
    units = np.array([0, 0, 1, 2, 2, 2])
    drawn = Redraw(TwoArmSample((values, values), (units, units), 3)).draw(50, 1.0, np.random.default_rng(2))
    sizes = {1.0: 2, 2.0: 1, 3.0: 3}
    for unit in range(50):
        for arm in (0, 1):
            mine = drawn.values[arm][drawn.units[arm] == unit]
            assert len(mine) == sizes[mine[0]]
            assert len(set(mine)) == 1


@pytest.mark.parametrize("share_b", [0.5, 0.1])
def test_bug_units_of_one_arm_are_assigned_by_chance_in_the_recorded_proportion(share_b: float) -> None:
    rng = np.random.default_rng(3)
    units = np.arange(200)
    in_b = units < 200 * share_b
    values = np.ones(200)
    redraw = Redraw(TwoArmSample((values[~in_b], values[in_b]), (units[~in_b], units[in_b]), 200))
    found = []
    for _ in range(300):
        a, b = redraw.draw(40, 1.0, rng).present()
        assert not np.any(a & b)
        found.append(int(b.sum()))
    chances = binom(40, share_b)
    assert np.mean(found) == pytest.approx(chances.mean(), abs=0.6)
    assert np.std(found) == pytest.approx(chances.std(), rel=0.2)


def test_bug_the_planned_blocks_give_both_arms_enough() -> None:
    """A large effect needs few blocks, of which chance may give an arm fewer than a verdict needs."""
    plan = manifest(arms={"a": {}, "b": {}}, assignment={"mode": "switchback"})
    capture = switchback(plan, 60, 5, 1.0, seed=7)
    found = plan_size(plan, capture, MetricTarget(metric="e2e_ms"), Stopping(), 0.5, 0.8)
    in_b = binom(found.units, 0.5)
    assert in_b.cdf(found.units - MIN_UNITS) - in_b.cdf(MIN_UNITS - 1) >= found.power_bounds[0] >= 0.75


@pytest.mark.parametrize("wanted", [0.98, 0.985, 0.999])
def test_bug_too_low_a_power_calls_for_more_units(monkeypatch: pytest.MonkeyPatch, wanted: float) -> None:
    asked: list[int] = []

    def draw(redraw: Redraw, n_units: int, *_: object) -> TwoArmSample:
        asked.append(n_units)
        return paired_sample(np.ones(n_units), np.ones(n_units))

    def low(*_: object) -> Interval:
        return Interval(0.8, 0.9 if len(asked) % 10 else 1.1)  # nine of ten simulations find the change

    monkeypatch.setattr(Redraw, "draw", draw)
    monkeypatch.setattr(power, "_ratio", low)
    plan = manifest(assignment={"mode": "aa"})
    capture = paired(plan, 60, 1.0, 1)
    found = plan_size(plan, capture, MetricTarget(metric="e2e_ms"), Stopping(), 0.3, wanted, 20)
    sizes = list(dict.fromkeys(asked))
    assert len(sizes) > 1
    assert asked == sorted(asked)
    assert all(after < 4 * before for before, after in itertools.pairwise(sizes))  # as far as the formula says
    assert found.units == sizes[-1] * found.merged
