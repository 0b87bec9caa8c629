"""The clock's word on costly drafting: losses let it rest, ever longer; wins and noise do not."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from specdec.control.gates import BALANCE_LONGEST_PAUSE, FIRST_PAUSE, LIMIT, Balance


def rested(balance: Balance, gains: Iterable[float]) -> list[bool]:
    """Steps that want the drafter; it is on unless it rests."""
    found = []
    for gain in gains:
        found.append(balance.rests)
        balance.observe(None if balance.rests else gain)
    return found


def pauses(states: list[bool]) -> list[int]:
    found = "".join("r" if state else " " for state in states).split()
    return [len(one) for one in found]


@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_a_loss_is_paused_ever_longer_and_so_costs_little_in_the_end(sequences: int) -> None:
    states = rested(Balance(sequences), [-0.08] * 20_000)
    assert states.index(True) == pytest.approx(LIMIT / math.sqrt(sequences) / 0.08, abs=2)
    assert pauses(states)[:5] == [FIRST_PAUSE << i for i in range(5)]
    assert max(pauses(states)) == BALANCE_LONGEST_PAUSE
    lost = 0.08 * states.count(False) / len(states)
    assert lost < 0.015


@pytest.mark.parametrize(("sequences", "gain"), [(1, 0.5), (8, 0.15), (32, 0.1)])
def test_a_win_is_hardly_ever_paused_however_noisy(sequences: int, gain: float) -> None:
    rng = random.Random(1)
    states = rested(Balance(sequences), [gain + rng.gauss(0, 1 / math.sqrt(sequences)) for _ in range(20_000)])
    assert sum(states) < 0.01 * len(states)


def test_after_a_win_a_loss_pauses_for_the_first_time_again() -> None:
    balance = Balance(8)
    rested(balance, [-0.1] * 400)
    while balance.rests:
        balance.observe(None)
    states = rested(balance, [0.2] * 200 + [-0.1] * 100)
    assert pauses(states)[0] == FIRST_PAUSE


def test_steps_that_say_nothing_change_nothing() -> None:
    balance = Balance(1)
    balance.observe(-LIMIT + 0.1)
    for _ in range(1000):
        balance.observe(None)
    assert not balance.rests
    balance.observe(-0.2)
    assert balance.rests
