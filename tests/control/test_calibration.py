"""Calibrated chances: true rates in spite of censoring, caution with few observations, forgetting, bounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.control.controller import Controller
from specdec.control.estimates.acceptance import CELLS, Calibration, temperature_bucket
from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import DraftWork
from specdec.control.learning import Estimates
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.core.tree import TokenTree
from tests.control.helpers import make_one, outcome_of, take_step

RATES = {1: 0.9, 2: 0.6, 3: 0.8}
"""Chance that the target follows the chain at a depth, once it came that far."""


def depth_cell(calibration: Calibration, depth: int) -> int:
    return calibration.cell("d", 0, 0, depth, 0.7)


def simulate(count_censored: bool) -> dict[int, float]:
    """Chances by depth learnt from chains of three; the biased variant counts nodes under rejected ones as misses."""
    rng, calibration = random.Random(3), Calibration(["d"])
    for step in range(6000):
        reached = True
        for depth, rate in RATES.items():
            if reached or count_censored:
                reached = reached and rng.random() < rate
                calibration.observe([(depth_cell(calibration, depth), reached)])
        if step % 6 == 0:
            calibration.refresh()
    return {depth: calibration.rate(depth_cell(calibration, depth)) for depth in RATES}


def right(found: dict[int, float]) -> bool:
    return all(abs(found[depth] - rate) < 0.06 for depth, rate in RATES.items())


def test_true_rates_are_found_when_censored_nodes_are_excluded() -> None:
    assert right(simulate(count_censored=False))


def test_the_test_above_detects_counted_censored_nodes() -> None:
    assert not right(simulate(count_censored=True))


def test_the_controller_excludes_nodes_under_a_rejected_one() -> None:
    """The same chains through `Controller.observe`, verified or not."""
    controller = Controller(Estimates({"d": False}, CostTable.guess(64), {}))
    calibration, rng = controller.estimates.calibration, random.Random(3)
    one = make_one()
    for _ in range(6000):
        tree = TokenTree(0)
        tokens: list[int] = []
        for depth, rate in RATES.items():
            tree.add(depth - 1, depth, -0.1 * depth, "d", depth_cell(calibration, depth))
            if len(tokens) == depth - 1 and rng.random() < rate:
                tokens.append(depth)
        step, plan = take_step(controller, [one], {"d": DraftWork([tree], decisions=["free"])})
        controller.observe(step, plan, outcome_of(plan, [[*tokens, 99]]))
    assert right({depth: calibration.rate(depth_cell(calibration, depth)) for depth in RATES})


def learned_from(
    controller: Controller, tree: TokenTree, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[bool]:
    """Whether each observed node of a drafter's tree held its token; ``tokens`` are committed."""
    trials: list[tuple[int, bool]] = []
    monkeypatch.setattr(controller.estimates.calibration, "observe", trials.extend)
    step, plan = take_step(controller, [make_one()], {"d": DraftWork([tree], decisions=["free"])})
    controller.observe(step, plan, outcome_of(plan, [tokens]))
    return [hit for _, hit in trials]


def test_nothing_is_learned_from_nodes_under_a_rejected_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target generates 1, 2. It would do so under the rejected 9 too, but that is not observed."""
    controller = Controller(Estimates({"d": False}, CostTable.guess(64), {}))
    tree, cell = TokenTree(0), depth_cell(controller.estimates.calibration, 1)
    right, wrong = tree.add(0, 1, -0.1, "d", cell), tree.add(0, 9, -1.0, "d", cell)
    tree.add(wrong, 2, -1.1, "d", cell)
    tree.add(right, 7, -0.2, "d", cell)
    assert learned_from(controller, tree, [1, 2], monkeypatch) == [True, False, False]


def test_nothing_is_learned_from_nodes_beyond_the_committed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(Estimates({"d": False}, CostTable.guess(64), {}))
    tree = TokenTree(0)
    for depth in (1, 2, 3):
        tree.add(depth - 1, depth, -0.1, "d", depth_cell(controller.estimates.calibration, depth))
    assert learned_from(controller, tree, [1], monkeypatch) == [True]


def test_with_few_observations_the_estimate_stays_near_the_drafters_own() -> None:
    calibration = Calibration(["d"])
    cell = depth_cell(calibration, 1)
    before = calibration.rate(cell)
    assert before == pytest.approx(math.sqrt(0.65 * 0.8))
    assert calibration.chance(cell, 0.7) == pytest.approx(0.7)
    calibration.observe([(cell, False)])
    assert calibration.rate(cell) == before  # not before the next refresh
    calibration.refresh()
    assert 0.6 * before < calibration.rate(cell) < before
    calibration.observe([(cell, False)] * 200)
    calibration.refresh()
    assert calibration.rate(cell) < 0.02


def test_observations_at_one_depth_probability_and_temperature_inform_others() -> None:
    calibration = Calibration(["d", "other"])
    before = [calibration.rate(calibration.cell("d", 2, 0, 5, prob)) for prob in (0.7, 0.3)]
    calibration.observe([(depth_cell(calibration, 1), False)] * 100)
    calibration.refresh()
    assert calibration.rate(calibration.cell("d", 0, 0, 5, 0.7)) < 0.2
    for known, prob in zip(before, (0.7, 0.3), strict=True):
        assert calibration.rate(calibration.cell("d", 2, 0, 5, prob)) < 0.4 * known
        assert calibration.rate(calibration.cell("other", 2, 0, 5, prob)) == known
    assert calibration.rate(calibration.cell("d", 2, 1, 5, 0.7)) == before[0]


@pytest.mark.parametrize("claimed", [0.3, 0.5, 0.9])
def test_a_calibrated_drafter_keeps_its_own_probabilities(claimed: float) -> None:
    """Also within a cell, whose nodes are observed together."""
    calibration, rng = Calibration(["d"]), random.Random(5)
    for _ in range(400):
        calibration.observe(
            [(calibration.cell("d", 0, 0, depth, p), rng.random() < p) for depth in (1, 2, 3) for p in (claimed, 0.98)]
        )
        calibration.refresh()
    for depth in (1, 2, 3, 5):
        assert calibration.chance(calibration.cell("d", 0, 0, depth, claimed), claimed) == pytest.approx(
            claimed, abs=0.1
        )
    low, high = 0.52, 0.64  # of one cell
    cells = [calibration.cell("d", 0, 0, 1, prob) for prob in (low, high)]
    assert cells[0] == cells[1]
    assert calibration.chance(cells[0], high) == pytest.approx(high / low * calibration.chance(cells[0], low))


def test_a_lasting_change_is_followed() -> None:
    calibration = Calibration(["d"])
    cell = depth_cell(calibration, 1)
    for hit, count in ((True, 5000), (False, 700)):
        for _ in range(count):
            calibration.observe([(cell, hit)])
            calibration.refresh()
    assert calibration.rate(cell) < 0.25


def test_probabilities_are_never_certain() -> None:
    calibration = Calibration(["d"])
    sure, hopeless = calibration.cell("d", 0, 0, 1, 1.0), calibration.cell("d", 0, 0, 1, 0.001)
    for _ in range(3000):
        calibration.observe([(sure, True), (hopeless, False)])
    calibration.refresh()
    assert (calibration.rate(sure), calibration.rate(hopeless)) == (
        PARAMS.max_chance,
        PARAMS.min_chance,
    )


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 63), st.floats(0, 1), st.booleans()),
        max_size=50,
    )
)
def test_every_node_has_a_cell_and_every_probability_is_within_bounds(
    seen: list[tuple[int, int, int, float, bool]],
) -> None:
    calibration = Calibration(["a", "b"])
    for bucket, rank, depth, prob, hit in seen:
        cell = calibration.cell("b", bucket, rank, depth, prob)
        assert CELLS <= cell < 2 * CELLS
        calibration.observe([(cell, hit)])
    calibration.refresh()
    assert all(PARAMS.min_chance <= calibration.rate(cell) <= PARAMS.max_chance for cell in range(2 * CELLS))


def test_cells_of_different_nodes_differ() -> None:
    calibration = Calibration(["a", "b"])
    nodes = [
        (name, bucket, rank, depth, prob)
        for name in "ab"
        for bucket in range(4)
        for rank in range(4)
        for depth in (1, 2, 3, 4, 6, 9)
        for prob in (0.01, 0.03, 0.07, 0.15, 0.3, 0.4, 0.6, 0.7, 0.85, 0.92, 0.97, 0.99)
    ]
    assert len({calibration.cell(*node) for node in nodes}) == len(nodes) == 2 * CELLS


@pytest.mark.parametrize(("temperature", "bucket"), [(-1.0, 0), (0.0, 0), (0.01, 1), (0.49, 1), (0.7, 2), (1.5, 3)])
def test_temperature_buckets(temperature: float, bucket: int) -> None:
    assert temperature_bucket(temperature) == bucket


@pytest.mark.parametrize(("temperature", "bucket"), [(0.5, 1), (1.0, 2)])
def test_bug_temperature_edges_belong_below(temperature: float, bucket: int) -> None:
    assert temperature_bucket(temperature) == bucket
