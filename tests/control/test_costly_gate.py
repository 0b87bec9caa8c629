"""One costly drafter's gate: on where it pays, probed where not, steady in between."""

from __future__ import annotations

import itertools
import math

import pytest

from specdec.control.costs import CostTable
from specdec.control.gates import HORIZON, CostlyGate
from specdec.control.state import Turn
from tests.control.helpers import make_turn

PROBE_EVERY = 16
PLAIN_MS = 10.0
RATE = 1.0 / PLAIN_MS  # one sequence, plain decode


def make_gate(level_ms: float, per_row: float = 0.0) -> CostlyGate:
    rows = [1, 8, 64, 512]
    table = CostTable(rows, [0], [[level_ms + per_row * (n - 1) for n in rows]])
    return CostlyGate("m", table, PROBE_EVERY)


def decide(
    gate: CostlyGate, turns: list[Turn], covered: float = 0.0, eligible: bool = True, rate: float = RATE
) -> list[str]:
    n = len(turns)
    return gate.decide(turns, [covered] * n, [eligible] * n, rate * n, 0.0, PLAIN_MS)


def serve(gate: CostlyGate, turn: Turn, steps: int, gain: int, levels: int = 2, covered: float = 0.0) -> list[str]:
    """Decisions of ``steps`` steps in which the drafter brings ``gain`` tokens whenever it is asked."""
    decisions = []
    for _ in range(steps):
        (decision,) = decide(gate, [turn], covered)
        decisions.append(decision)
        if decision != "off":
            gate.observe(turn, gain, levels, 0, decision == "probe")
    return decisions


def gaps(decisions: list[str]) -> list[int]:
    """Steps between probes."""
    probes = [step for step, decision in enumerate(decisions) if decision == "probe"]
    return [b - a for a, b in itertools.pairwise(probes)]


def test_it_stays_on_while_it_pays() -> None:
    assert set(serve(make_gate(2.0), make_turn(), 100, gain=2)) == {"on"}


def test_it_is_switched_off_soon_when_it_does_not_pay() -> None:
    decisions = serve(make_gate(4.0), make_turn(), 40, gain=0)
    assert decisions[0] == "on"
    assert "on" not in decisions[12:]


@pytest.mark.parametrize(("times", "stays"), [(1.0, True), (2.0, False)])
def test_what_asking_takes_besides_its_levels_counts(times: float, stays: bool) -> None:
    gate, turn = make_gate(4.0), make_turn()
    decisions = []
    for _ in range(120):
        (decision,) = decide(gate, [turn])
        decisions.append(decision)
        if decision != "off":
            gate.observe(turn, 1, 2, 0, decision == "probe")
            gate.observe_ms([turn], 2, times * 8.0)
    assert (set(decisions) == {"on"}) == stays


def test_a_drafter_too_dear_for_any_gain_never_starts() -> None:
    assert serve(make_gate(50.0), make_turn(), 12, gain=3) == ["off"] * 12


def test_probes_come_about_every_sixteen_steps_and_back_off_to_four_times_that() -> None:
    decisions = serve(make_gate(1.5), make_turn(), 800, gain=0)
    found = gaps(decisions)
    first = decisions.index("probe") - decisions.index("off")
    assert first == pytest.approx(PROBE_EVERY, abs=1)
    assert found == sorted(found)
    assert found[0] <= 2 * PROBE_EVERY
    assert set(found[3:]) == {4 * PROBE_EVERY}


def test_it_comes_back_within_a_few_probes_when_it_pays_again() -> None:
    gate, turn = make_gate(4.0), make_turn()
    assert serve(gate, turn, 400, gain=0)[-1] == "off"
    decisions = serve(gate, turn, 400, gain=3)
    assert decisions.count("probe") <= 5
    assert set(decisions[-100:]) == {"on"}


@pytest.mark.parametrize("level_ms", [4.2, 4.6, 4.9, 5.0, 5.1])
def test_it_does_not_flap_around_the_threshold(level_ms: float) -> None:
    """Gains of 1 and 0 in turn are worth 0.5 tokens, 5 ms of plain decode, a level; levels cost about that."""
    gate, turn = make_gate(level_ms), make_turn()
    switches, last, gain = 0, "on", 0
    for _ in range(2000):
        (decision,) = decide(gate, [turn])
        switches += (decision == "on") != (last == "on")
        last = decision
        if decision != "off":
            gain = 1 - gain
            gate.observe(turn, gain, 1, 0, decision == "probe")
    assert switches <= 12


def test_what_was_not_verified_costs_no_row() -> None:
    """Of trees that are mostly pruned, only what is left is paid for: 1 token in 1 level of 5 ms and rows of 4 ms."""
    answers = []
    for rows in (0.5, 2.0):
        gate, turn = make_gate(5.0), make_turn()
        usage = gate.usage(turn)
        usage.gain, usage.levels, usage.rows = 1.0, 1.0, rows
        answers += gate.decide([turn], [0.0], [True], RATE, 4.0, PLAIN_MS)
    assert answers == ["on", "off"]


def test_others_gains_are_not_enough_to_read_a_long_text_for() -> None:
    """1.25 tokens of 10 ms in a level of 5: worth reading for 7 ms a turn, if it were known of this very text."""
    answers = []
    for turns in (0, 50):
        gate, turn = make_gate(5.0, per_row=0.5), make_turn(backlog={"m": 140}, room=1000)
        turn.control.emitted = 24
        usage = gate.usage(turn)
        usage.gain, usage.levels, usage.rows, usage.turns, usage.on = 1.25, 1.0, 0.0, turns, False
        answers += gate.decide([turn], [0.0], [True], RATE, 0.0, PLAIN_MS)
    assert answers == ["off", "on"]


def test_an_idle_sequence_comes_to_be_judged_by_what_others_show() -> None:
    gate, idle, other = make_gate(5.0), make_turn(1), make_turn(2)
    usage = gate.usage(idle)
    usage.gain, usage.on = 0.0, False
    for _ in range(100):
        decide(gate, [idle])
        gate.observe(other, 2, 1, 1)
    assert usage.gain > 1.0


def test_a_drafter_that_is_not_asked_gets_slow_with_its_machine() -> None:
    gate, turn = make_gate(7.0), make_turn()
    usage = gate.usage(turn)
    usage.gain, usage.levels, usage.rows = 1.0, 1.0, 0.0
    assert decide(gate, [turn]) == ["on"]
    gate.follow(1.8)
    assert decide(gate, [turn]) == ["off"]


def test_hysteresis_keeps_either_state() -> None:
    """At the very threshold a drafter that is on stays on, one that is off stays off."""
    gate, on, off = make_gate(5.0), make_turn(1), make_turn(2)
    for turn, state in ((on, True), (off, False)):
        usage = gate.usage(turn)
        usage.gain, usage.levels, usage.rows, usage.on = 1.0, 2.0, 0.0, state
    assert [decide(gate, [turn]) for turn in (on, off)] == [["on"], ["off"]]


def test_sequences_share_the_price_of_a_level() -> None:
    """A level costs 12 ms whoever takes part. Alone, 1.5 tokens in 2 levels are not worth that; to four sequences whose
    plain step takes 25 ms they are."""
    turns = [make_turn(i) for i in range(4)]
    gate = make_gate(12.0)
    for turn in turns:
        usage = gate.usage(turn)
        usage.gain, usage.levels = 1.5, 2.0
    assert decide(gate, turns[:1]) == ["off"]
    assert gate.decide(turns, [0.0] * 4, [True] * 4, 4 / 25, 0.0, 25.0) == ["on"] * 4


def test_those_that_do_not_pay_are_left_out_of_a_batch() -> None:
    turns = [make_turn(i) for i in range(3)]
    gate = make_gate(3.0, per_row=3.0)
    for turn, gain in zip(turns, (3.0, 0.1, 3.0), strict=True):
        usage = gate.usage(turn)
        usage.gain, usage.levels = gain, 3.0
    assert gate.decide(turns, [0.0] * 3, [True] * 3, RATE, 0.0, PLAIN_MS) == ["on", "off", "on"]


def test_what_free_drafters_cover_already_is_not_paid_for() -> None:
    gate, turn = make_gate(3.0), make_turn()
    assert decide(gate, [turn], covered=0.0) == ["on"]
    assert decide(gate, [turn], covered=0.9) == ["off"]


def test_rows_to_verify_are_part_of_the_price() -> None:
    gate, turn = make_gate(3.0), make_turn()
    assert gate.decide([turn], [0.0], [True], RATE, 0.0, PLAIN_MS) == ["on"]
    assert gate.decide([turn], [0.0], [True], RATE, 9.0, PLAIN_MS) == ["off"]


def test_a_long_backlog_must_pay_within_the_horizon() -> None:
    def decision(backlog: int, room: int = 1000) -> str:
        return decide(make_gate(2.0, per_row=0.5), [make_turn(backlog={"m": backlog}, room=room)])[0]

    assert decision(0) == decision(16) == "on"
    assert decision(100) == "on"
    assert decision(100, room=4) == "off"  # the request ends before it pays
    assert decision(4000) == "off"
    assert HORIZON < 1000


def test_a_probe_that_would_read_a_long_text_is_not_made() -> None:
    def probes(backlog: int) -> bool:
        gate, turn = make_gate(2.0, per_row=0.5), make_turn(backlog={"m": backlog})
        usage = gate.usage(turn)
        usage.gain, usage.on = 0.0, False
        return "probe" in [decide(gate, [turn])[0] for _ in range(200)]

    assert probes(18)
    assert not probes(40)


def test_probes_of_many_sequences_share_the_time_for_them() -> None:
    """Eight sequences of a drafter that brings nothing: what probing takes stays a small share of the steps' time."""
    gate, turns = make_gate(2.0, per_row=0.0), [make_turn() for _ in range(8)]
    probes = 0
    for _ in range(1000):
        for turn, decision in zip(turns, decide(gate, turns), strict=True):
            if decision != "off":
                probes += decision == "probe"
                gate.observe(turn, 0, 2, 0, decision == "probe")
    assert 0 < probes * 2 * 2.0 <= 1000 * PLAIN_MS * 0.026


def test_a_sequence_about_to_end_is_not_probed() -> None:
    gate, turn = make_gate(50.0), make_turn(room=8)
    assert set(serve(gate, turn, 100, gain=0)) == {"off"}


def test_forced_turns_are_always_asked_and_others_share_their_level() -> None:
    forced, other = make_turn(1, forced=True), make_turn(2)
    gate = make_gate(20.0)
    assert gate.decide([other], [0.0], [True], RATE, 0.0, PLAIN_MS) == ["off"]
    assert gate.decide([forced, other], [0.9, 0.0], [True, True], RATE, 0.0, PLAIN_MS)[0] == "forced"
    cheap = make_gate(7.0)
    usage = cheap.usage(other)
    usage.gain, usage.levels, usage.on = 1.0, 2.0, True
    assert cheap.decide([other], [0.0], [True], RATE, 0.0, PLAIN_MS) == ["off"]
    assert cheap.decide([forced, other], [0.0, 0.0], [True, True], RATE, 0.0, PLAIN_MS) == ["forced", "on"]


def test_who_is_not_eligible_is_not_asked_and_ages_not() -> None:
    gate, turn = make_gate(50.0), make_turn()
    for _ in range(100):
        assert decide(gate, [turn], eligible=False) == [""]
    assert serve(gate, turn, PROBE_EVERY - 1, gain=0) == ["off"] * (PROBE_EVERY - 1)


def test_new_sequences_start_from_what_others_of_their_temperature_showed() -> None:
    gate = make_gate(4.0)
    for key in range(60):
        serve(gate, make_turn(key), 10, gain=0)
    assert decide(gate, [make_turn(100)]) == ["off"]
    warm = make_turn(101)
    warm.control.bucket = 2
    assert decide(gate, [warm]) == ["on"]


def test_the_floor_of_a_level_is_its_price_in_tokens_per_sequence() -> None:
    """What is paid for a level must come back as tokens that follow a node that is reached."""
    gate = make_gate(2.0, per_row=0.0)
    follow = gate.pace(RATE, 1.0).follow
    assert math.exp(gate.pace(RATE, 1.0).floor(1)) == pytest.approx(0.3 / follow)
    assert math.exp(gate.pace(4 * RATE, 1.0).floor(4)) == pytest.approx(0.6 / follow)
    assert math.exp(gate.pace(100.0, 1.0).floor(1)) == pytest.approx(0.95)
    for _ in range(200):
        gate.observe(make_turn(), 1, 4, 0)  # one level of two holds what it should
    assert gate.pace(RATE, 1.0).follow == pytest.approx(0.5, abs=0.02)


def test_trees_that_grow_together_share_the_price_of_a_level() -> None:
    pace = make_gate(2.0, per_row=0.0).pace(RATE, 0.0)
    alone = 2.0 * RATE / pace.follow
    assert pace.keep([alone * 1.01]) == 1
    assert pace.keep([alone * 0.99]) == 0
    assert pace.keep([alone * 0.6] * 2) == 2  # together they pay
    assert pace.keep([alone * 1.5, alone * 0.01]) == 2  # a tree that costs nothing more may come along
    assert pace.keep([alone * 0.01], others=1) == 1


def test_bug_probes_of_a_drafter_too_dear_to_pay_back_off() -> None:
    """A perfect drafter as dear as three plain steps a level: each probe of three levels costs nine steps for three."""
    decisions = serve(make_gate(30.0), make_turn(), 800, gain=3, levels=3)
    assert decisions.count("probe") <= 800 // (2 * PROBE_EVERY)


def test_bug_probes_of_a_shallow_drafter_that_pays_do_not_back_off() -> None:
    gate, turn = make_gate(5.0), make_turn()
    for gain in (1, 1):
        gate.observe(turn, gain, 1, 1, probe=True)
    assert gate.usage(turn).misses == 0


def test_more_sequences_than_were_measured_share_the_price_of_as_many_as_were() -> None:
    """Two take 8 ms a level, so four are thought to: 2 ms each, and a level brings 1.4 ms' worth of tokens."""
    gate = CostlyGate("m", CostTable([1, 2], [0], [[2.0, 8.0]]), PROBE_EVERY)
    assert "on" not in decide(gate, [make_turn(i) for i in range(4)])
    gate = CostlyGate("m", CostTable([1, 2], [0], [[2.0, 4.0]]), PROBE_EVERY)
    assert decide(gate, [make_turn(i) for i in range(4)]) == ["on"] * 4
