"""The whole controller in a world of known costs and chances: what it earns against the best fixed setting."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.control.controller import LOOK_EVERY
from specdec.control.state import Outcome
from tests.control.simulator import Simulation, Skilled, World, best_fixed

GOOD = (0.9, 0.05), (0.5, 0.2)
MIDDLING = (0.8, 0.1), (0.25, 0.1)
USELESS = (0.02, 0.01), (0.02, 0.01)

TARGETS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: 60 * (1 + 0.03 * (rows - 1)),
    "flatter": lambda rows: 60 * (1 + 0.008 * (rows - 1)),
    "steep": lambda rows: 20 * (1 + 0.25 * (rows - 1)),
    "knee": lambda rows: 60 * (1 + 0.004 * min(rows - 1, 7) + 0.06 * max(0, rows - 8)),
}
STEPS, WARM_UP = 1200, 300


def level(ms: float) -> Callable[[int], float]:
    """Price of a draft model's level by sequences."""
    return lambda batch: ms * (1 + 0.1 * (batch - 1))


def world(target: str, skill: tuple[tuple[float, ...], ...], level_ms: float | None, sequences: int) -> World:
    price = None if level_ms is None else level(level_ms)
    return World([Skilled("m", skill[0], skill[1], level_ms=price)], TARGETS[target], sequences)


def earned(made: World) -> float:
    """Tokens per millisecond of the controller, once it knows its drafters."""
    simulation = Simulation(made)
    simulation.run(WARM_UP // made.sequences)
    return simulation.run(STEPS // made.sequences).rate


def plain(made: World) -> float:
    return made.sequences / made.verify_ms(made.sequences)


def check_near_best(made: World) -> None:
    best, setting = best_fixed(made, made.drafters[0], STEPS // made.sequences)
    auto = earned(made)
    assert auto >= 0.95 * best, (
        f"{auto / best:.3f} of always drafting {setting}, {auto / plain(made):.2f} of plain decode"
    )


@pytest.mark.parametrize(
    ("target", "skill", "level_ms", "sequences"),
    [
        ("flat", GOOD, None, 1),
        ("flat", MIDDLING, None, 4),
        ("flatter", GOOD, None, 4),
        ("steep", GOOD, None, 1),
        ("steep", MIDDLING, None, 4),
        ("knee", GOOD, None, 4),
        ("flat", GOOD, 2.0, 1),
        ("flat", GOOD, 2.0, 4),
        ("flatter", GOOD, 2.0, 4),
        ("knee", GOOD, 8.0, 1),
        ("flat", MIDDLING, 30.0, 4),
    ],
)
def test_within_five_percent_of_the_best_fixed_setting(
    target: str, skill: tuple[tuple[float, ...], ...], level_ms: float | None, sequences: int
) -> None:
    check_near_best(world(target, skill, level_ms, sequences))


@pytest.mark.parametrize(
    ("target", "skill", "level_ms", "sequences"),
    [
        ("flat", MIDDLING, 8.0, 1),
        ("flat", MIDDLING, 8.0, 4),
        ("flat", GOOD, 8.0, 4),
        ("flatter", GOOD, 8.0, 4),
        ("knee", GOOD, 8.0, 4),
        ("knee", MIDDLING, 8.0, 4),
        ("steep", GOOD, 2.0, 1),
    ],
)
def test_bug_costly_drafters_far_from_the_best_fixed_setting(
    target: str, skill: tuple[tuple[float, ...], ...], level_ms: float | None, sequences: int
) -> None:
    check_near_best(world(target, skill, level_ms, sequences))


@pytest.mark.parametrize("target", ["flat", "steep"])
@pytest.mark.parametrize(("level_ms", "sequences"), [(None, 1), (None, 4), (2.0, 1), (8.0, 4)])
def test_a_useless_drafter_costs_next_to_nothing(target: str, level_ms: float | None, sequences: int) -> None:
    made = world(target, USELESS, level_ms, sequences)
    assert earned(made) >= 0.98 * plain(made)


def test_a_drafter_too_dear_to_use_costs_next_to_nothing() -> None:
    """It is right every other time, and a level costs half a plain step, more for four."""
    made = World([Skilled("m", (0.5,), (0.5,), level_ms=level(30.0))], TARGETS["flat"], 4)
    assert earned(made) >= 0.97 * plain(made)


def test_bug_a_perfect_drafter_dearer_than_the_target_costs_next_to_nothing() -> None:
    made = World([Skilled("m", (0.99,), (0.99,), level_ms=level(120.0))], TARGETS["flat"], 1)
    assert earned(made) >= 0.97 * plain(made)


def test_a_drafter_that_boasts_is_seen_through() -> None:
    made = World([Skilled("m", (0.05,), (0.05,), claims=0.97)], TARGETS["steep"], 4)
    assert earned(made) >= 0.98 * plain(made)


def test_a_modest_drafter_is_found_out_too() -> None:
    modest = World([Skilled("m", (0.9,), (0.9,), claims=0.4)], TARGETS["flat"], 1)
    honest = World([Skilled("m", (0.9,), (0.9,))], TARGETS["flat"], 1)
    assert earned(modest) >= 0.95 * earned(honest) > 3 * plain(honest)


def test_a_free_drafter_that_says_enough_silences_a_costly_one() -> None:
    free = Skilled("free", (0.97,), (0.97,))
    costly = Skilled("costly", (0.97,), (0.97,), level_ms=level(8.0))
    made = World([costly, free], TARGETS["flat"], 1)
    simulation = Simulation(made)
    assert simulation.controller.order == ["free", "costly"]
    simulation.run(WARM_UP)
    tally = simulation.run(STEPS)
    assert tally.asked["costly"] < STEPS / 10
    assert tally.asked["free"] == STEPS


def test_forced_turns_verify_everything_proposed() -> None:
    made = world("steep", USELESS, 2.0, 2)
    tally = Simulation(made).run(20, forced=True)
    assert tally.asked["m"] == 20
    assert tally.verified >= 20 * 2 * 20


@pytest.mark.parametrize("level_ms", [None, 2.0])
@pytest.mark.parametrize("new_requests", [False, True])
def test_bug_a_drafter_that_was_useless_comes_back(level_ms: float | None, new_requests: bool) -> None:
    """Eight sequences whose drafter is right in 1 of 20 for a while, then in 9 of 10, always claiming 0.8."""
    price = None if level_ms is None else level(level_ms)
    made = World([Skilled("m", (0.05,), (0.05,), claims=0.8, level_ms=price)], TARGETS["flat"], 8)
    simulation = Simulation(made)
    simulation.run(100)
    simulation.world = World([Skilled("m", (0.9,), (0.9,), claims=0.8, level_ms=price)], TARGETS["flat"], 8)
    if new_requests:
        simulation.renew()
    simulation.run(200)
    assert simulation.run(100).rate > 1.5 * plain(made)


@pytest.mark.parametrize(("reading", "row"), [(1.0, 3.0), (1.3, 2.0), (1.5, 1.5), (0.7, 2.0)])
@pytest.mark.parametrize("sequences", [4, 8])
def test_bug_a_machine_that_changes_while_drafting_pays(reading: float, row: float, sequences: int) -> None:
    """Drafting just paid; then reading weights takes ``reading`` times as long and a row's arithmetic ``row`` times."""
    made = World([Skilled("m", *MIDDLING, level_ms=level(9.0))], lambda rows: 60 + 0.6 * (rows - 1), sequences)
    simulation = Simulation(made)
    simulation.run(WARM_UP)
    made.verify_ms = lambda rows: 60 * reading + 0.6 * row * (rows - 1)
    simulation.run(WARM_UP)
    rate, without = simulation.run(STEPS).rate, plain(made)
    best, setting = best_fixed(made, made.drafters[0], STEPS // sequences)
    assert rate >= 0.985 * without
    assert rate >= 0.94 * best, setting


@pytest.mark.parametrize(("chance", "looks"), [(0.2, True), (0.9, False)])
def test_plain_decoding_is_looked_at_where_drafting_wins_little(chance: float, looks: bool) -> None:
    """A drafter that always offers one token: worth its row at either chance, but one wins by a wide margin."""
    made = World([Skilled("m", (chance,), (chance,))], TARGETS["flat"])
    simulation = Simulation(made)
    simulation.run(WARM_UP)
    longest = run = 0
    for _ in range(STEPS // 4):
        run = run + 1 if simulation.run(1).verified else 0
        longest = max(longest, run)
    assert (longest <= LOOK_EVERY) is looks


def test_the_clock_silences_a_drafter_that_the_gate_believes_in() -> None:
    """What the drafter says it takes is what the gate weighs; the propose stage takes 200 ms more."""
    made = world("flat", GOOD, 5.0, 1)
    simulation = Simulation(made)
    simulation.run(WARM_UP)
    believed = simulation.run(WARM_UP).asked["m"]
    observe = simulation.controller.observe

    def slower(outcome: Outcome, decisions: dict[str, list[str]]) -> None:
        outcome.draft_ms += 200.0 if outcome.work else 0.0
        observe(outcome, decisions)

    simulation.controller.observe = slower  # type: ignore[method-assign,assignment]
    simulation.run(WARM_UP)
    assert believed > 0.9 * WARM_UP
    assert simulation.run(WARM_UP).asked.get("m", 0) < 0.3 * WARM_UP


def test_decisions_are_a_function_of_what_is_told() -> None:
    tallies = [Simulation(world("flat", GOOD, 8.0, 2)).run(150) for _ in range(2)]
    assert tallies[0] == tallies[1]
