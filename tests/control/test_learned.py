"""Values that outlast a controller: exact as plain values, and of bounded weight."""

from __future__ import annotations

import json

import pytest

from specdec.control.controller import Controller
from specdec.control.estimates.learned import Learned
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from tests.control.simulator import Simulation, Skilled, World


def level(rows: int) -> float:
    return 15.0 + 1.3 * (rows - 1)


def world(skill: float, sequences: int = 1, seed: int = 1) -> World:
    made = Skilled("m", (skill,), (skill,), level_ms=level)
    return World([made], lambda rows: 60 + 2.4 * (rows - 1), sequences, seed=seed)


def after(skill: float, answers: int) -> dict[str, Learned]:
    """Return what a controller has learned after this many answers."""
    simulation = Simulation(world(skill, seed=2), lengths=(32, 96), prompt=160)
    simulation.serve(answers)
    return simulation.controller.estimates.learned()


def started(made: World, learned: dict[str, Learned]) -> Controller:
    plain = made.controller().as_dict()
    return Controller.from_dict(plain | {"start": {name: one.bounded().as_dict() for name, one in learned.items()}})


def test_plain_values_are_exact() -> None:
    learned = after(0.8, 6)["m"]
    assert learned.cells
    assert learned.pools
    assert Learned.from_dict(json.loads(json.dumps(learned.as_dict()))) == learned
    bounded = learned.bounded()
    assert Learned.from_dict(json.loads(json.dumps(bounded.as_dict()))) == bounded == bounded.bounded()


def test_initial_estimates_count_as_a_few_observations() -> None:
    learned = Learned([(1, 900.0, 1000.0), (2, 1.0, 2.0)], [(0, 200.0, 400.0, 800.0, 600.0)], 0.9).bounded()
    assert learned.cells == [
        (1, 0.9 * PARAMS.learned_cell_trials, PARAMS.learned_cell_trials),
        (2, 1.0, 2.0),
    ]
    assert learned.pools == [
        (
            0,
            PARAMS.learned_pool_steps,
            2 * PARAMS.learned_pool_steps,
            4 * PARAMS.learned_pool_steps,
            3 * PARAMS.learned_pool_steps,
        )
    ]


def test_a_controller_exports_its_initial_estimates() -> None:
    learned = after(0.8, 6)
    controller = started(world(0.8), learned)
    assert Controller.from_dict(controller.as_dict()).as_dict() == controller.as_dict()
    known, bounded = controller.estimates.learned()["m"], learned["m"].bounded()
    assert (known.cells, known.agreement) == (bounded.cells, bounded.agreement)
    (pool,) = known.pools
    assert pool[1] == PARAMS.learned_pool_steps + PARAMS.restart_prior_steps
    cell, hits, trials = max(learned["m"].cells, key=lambda one: one[2])
    fresh = world(0.8).controller().estimates.calibration.rate(cell)
    assert abs(controller.estimates.calibration.rate(cell) - hits / trials) < abs(fresh - hits / trials)


def test_initial_estimates_may_include_missing_drafters() -> None:
    controller = started(world(0.8), {"another": Learned([(1, 1.0, 2.0)], [], None)})
    assert controller.estimates.learned() == {}


def test_a_drafter_known_not_to_pay_is_probed_at_most_once_after_a_restart() -> None:
    """One sequence probes it, since requests may have changed; four, which would all prefill, do not."""
    alone, four = world(0.1), world(0.1, 4)
    known = after(0.1, 12)
    simulation = Simulation(alone, started(alone, known), lengths=(32, 32), prompt=160)
    first, later = simulation.serve(2), simulation.serve(6)
    assert first.active.get("m", 0) <= 8
    assert later.rate >= 0.99 / alone.verify_ms(1)
    together = Simulation(four, started(four, known), lengths=(32, 32), prompt=160).serve(8)
    assert together.rate >= 0.99 * 4 / four.verify_ms(4)


@pytest.mark.parametrize("then", [0.02, 0.1, 0.4])
def test_a_wrong_start_costs_little(then: float) -> None:
    """It was useless before; now it is right nine times of ten."""
    made = world(0.9)
    known = Simulation(made, started(made, after(then, 12)), lengths=(64, 96), prompt=160).serve(4)
    fresh = Simulation(made, lengths=(64, 96), prompt=160).serve(4)
    assert known.rate > 0.9 * fresh.rate > 1.25 / made.verify_ms(1)
