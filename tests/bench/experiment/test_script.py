"""Both arms get the same requests, neither uses the other's cache, and no order is favoured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.experiment.plan import Script, arrival_times
from bench.serve.schedule import endless_requests
from server.experiment.config import Load
from tests.bench.experiment.fake_arm import prompt_of
from tests.bench.experiment.plays import plan


def script(attempt: int = 0, **fields: Any) -> Script:
    return Script(plan(**fields), attempt)


@given(st.text(max_size=8))
def test_order_is_balanced_in_every_two_turns(salt: str) -> None:
    found = script(assignment={"salt": salt})
    assert all({found.first(2 * i), found.first(2 * i + 1)} == {0, 1} for i in range(20))


def test_neither_arm_is_always_first_in_odd_turns() -> None:
    firsts = Counter(script(assignment={"salt": str(i)}).first(0) for i in range(400))
    assert 150 < firsts[0] < 250  # 5 standard deviations


@pytest.mark.parametrize("concurrency", [1, 3, 7])
@pytest.mark.parametrize("done", [set(), {0, 4, 5, 19}, set(range(20))])
def test_every_pair_once(concurrency: int, done: set[int]) -> None:
    turns = list(script(load={"workload": "chat", "concurrency": concurrency}).turns(done))
    numbers = [Script.number(asked.ask.name) for turn in turns for asked in turn.asks]
    assert numbers == [n for n in range(20) if n not in done]
    assert all(len(turn.asks) <= concurrency for turn in turns)


def test_what_is_asked_does_not_depend_on_how_often_a_run_was_taken_up() -> None:
    def asked(attempt: int, done: set[int]) -> dict[int | None, tuple[object, int | None, int]]:
        return {
            Script.number(one.ask.name): (prompt_of(one.ask), one.ask.seed, turn.first)
            for turn in script(attempt).turns(done)
            for one in turn.asks
        }

    whole = asked(0, set())
    rest = asked(3, {0, 1, 2, 9})
    assert rest == {number: value for number, value in whole.items() if number not in (0, 1, 2, 9)}
    assert len({value[1] for value in whole.values()}) == 20


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_salts(cache: str) -> None:
    salts: dict[tuple[int, int], list[str]] = {}
    for attempt in (0, 1):
        found = script(attempt, load={"workload": "chat", "cache": cache})
        for turn in found.turns(set()):
            for asked in turn.asks:
                for arm in (0, 1):
                    sent = found.in_arm(arm, asked.ask)
                    assert (prompt_of(sent), sent.seed, sent.name) == (
                        prompt_of(asked.ask),
                        asked.ask.seed,
                        asked.ask.name,
                    )
                    salts.setdefault((attempt, arm), []).append(sent.salt)
    sets = [set(found) for found in salts.values()]
    assert all(not sets[i] & sets[j] for i in range(4) for j in range(i))
    assert [len(found) for found in sets] == [20 if cache == "cold" else 1] * 4


def test_a_warm_arm_keeps_apart_what_a_trace_kept_apart() -> None:
    found = script(load={"workload": "chat", "cache": "warm"})
    one = next(found.turns(set())).asks[0]
    other = dataclasses.replace(one.ask, salt="another tenant")
    assert found.in_arm(0, one.ask).salt != found.in_arm(0, other).salt


def test_what_warmed_up_is_not_asked_again() -> None:
    found = script(warmup_requests=5)
    warm = [turn.asks[0] for turn in found.warm_up()]
    assert [Script.number(asked.ask.name) for asked in warm] == [None] * 5
    counted = [asked for turn in found.turns(set()) for asked in turn.asks]
    prompts = [prompt_of(asked.ask) for asked in (*warm, *counted)]
    assert prompts == [prompt_of(ask) for ask in islice(endless_requests("chat"), 25)]
    assert len({asked.ask.name for asked in (*warm, *counted)}) == 25


def test_arrival_times_are_the_same_in_every_turn_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.experiment.config.OPEN_TURN", 8)
    load = {"workload": "chat", "rate": 4.0}
    turns = list(script(load=load).turns(set()))
    assert [len(turn.asks) for turn in turns] == [8, 8, 4]
    assert all(turn.asks[0].offset_s == 0 for turn in turns)
    assert all(a.offset_s <= b.offset_s for turn in turns for a, b in pairwise(turn.asks))
    assert turns == list(script(load=load).turns(set()))
    assert turns != list(script(load=load | {"seed": 1}).turns(set()))


@pytest.mark.parametrize(("arrivals", "spread"), [("constant", 0.0), ("poisson", 1.0), ("gamma", 2.0)])
def test_arrivals_have_the_rate_and_the_gaps_asked_for(arrivals: Any, spread: float) -> None:
    load = Load(workload="chat", rate=8.0, arrivals=arrivals, shape=0.25)
    times = [at for at, _ in zip(arrival_times(load), range(4001), strict=False)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert deviation / mean == pytest.approx(spread, abs=0.15)
