"""Free drafters are asked where they pay for their time, and looked at again where they do not."""

from __future__ import annotations

import pytest

from specdec.control.controller import Controller
from specdec.control.costs import CostTable
from specdec.control.gates import LOOKUP_MOST_MISSES, SHORTEST_PAUSE, FreeGate
from specdec.control.state import DraftWork, Outcome, SequenceControl, Turn
from tests.control.helpers import chain

TOKEN_MS = 10.0


def make_turn(forced: bool = False, fresh: bool = False) -> Turn:
    return Turn(SequenceControl(1, 0), 100, 31, 500, forced, 0.0, fresh)


def settle(gate: FreeGate, turn: Turn, gain: float, turns: int, ms: float = 0.2) -> list[bool]:
    """``turns`` turns of a text that brings ``gain`` tokens whenever it is asked for."""
    asked = []
    for _ in range(turns):
        (asks,) = gate.decide([turn], TOKEN_MS)
        gate.observe_ms(ms, int(asks))
        gate.observe(turn, asks, gain if asks else 0.0)
        asked.append(asks)
    return asked


def test_a_text_that_repeats_nothing_is_asked_for_ever_less() -> None:
    asked = settle(FreeGate(), make_turn(), 0.0, 400)
    assert all(asked[:20])
    longest = SHORTEST_PAUSE << LOOKUP_MOST_MISSES
    assert sum(asked[-160:]) == pytest.approx(160 / longest, abs=1)


def test_a_text_that_gains_is_always_asked_for() -> None:
    assert all(settle(FreeGate(), make_turn(), 0.5, 300))


@pytest.mark.parametrize(("ms", "always"), [(0.2, True), (5.0, False)])
def test_the_gain_is_weighed_against_the_time(ms: float, always: bool) -> None:
    asked = settle(FreeGate(), make_turn(), 0.1, 600, ms)
    assert all(asked[300:]) == always


def test_rows_that_cost_more_than_they_bring_send_it_to_sleep() -> None:
    assert not all(settle(FreeGate(), make_turn(), -0.3, 200))


def test_one_find_wakes_it() -> None:
    gate, turn = FreeGate(), make_turn()
    settle(gate, turn, 0.0, 200)
    found = settle(gate, turn, 2.0, 40)
    first = found.index(True)
    assert first < SHORTEST_PAUSE << LOOKUP_MOST_MISSES
    assert all(found[first:])


def test_new_texts_start_from_what_others_brought() -> None:
    """Short answers would end before each had found out for itself."""
    dull, rich = FreeGate(), FreeGate()
    for _ in range(20):
        settle(dull, make_turn(), 0.0, 30)
        settle(rich, make_turn(), 1.0, 30)
    assert sum(settle(dull, make_turn(), 0.0, 30)) < 10
    assert all(settle(rich, make_turn(), 0.0, 20))


def test_one_lucky_token_does_not_keep_it_awake_long() -> None:
    gate, turn = FreeGate(), make_turn()
    settle(gate, turn, 0.0, 200)
    asked = settle(gate, turn, 0.5, 16)
    assert True in asked
    assert not all(settle(gate, turn, 0.0, 45))


def test_a_pause_is_each_sequence_s_own() -> None:
    gate, dull, rich = FreeGate(), make_turn(), make_turn()
    settle(gate, dull, 0.0, 200)
    asks = [gate.decide([dull, rich], TOKEN_MS) for _ in range(3)]
    assert all(rich_asks for _, rich_asks in asks)
    assert not any(dull_asks for dull_asks, _ in asks)


@pytest.mark.parametrize("turn", [make_turn(forced=True), make_turn(fresh=True)])
def test_mode_on_and_first_tokens_are_always_asked_for(turn: Turn) -> None:
    assert all(settle(FreeGate(), turn, 0.0, 200))


@pytest.mark.parametrize(("draft_ms", "least", "most"), [(0.1, 100, 100), (500.0, 2, 60)])
def test_the_time_that_asking_takes_counts(draft_ms: float, least: int, most: int) -> None:
    """A node is accepted every time; where proposing takes as long as several tokens, it is soon asked for seldom."""
    controller, turn, times = Controller({"s": False}, CostTable.guess(64), {}, probe_every=16), make_turn(), 0
    for _ in range(100):
        controller.begin([turn], 0)
        asks = controller.free_gate()[0]
        times += asks
        tree = chain([0.9] if asks else [], source="s", cells=[0] if asks else [])
        controller.choose([tree], draft_ms)
        said = [1, 9] if asks else [9]
        work = {"s": DraftWork([tree], 1, 0.0)} if asks else {}
        controller.observe(Outcome([said], len(tree), 0.0, 20.0, work, draft_ms if asks else 0.0), {})
    assert least <= times <= most
