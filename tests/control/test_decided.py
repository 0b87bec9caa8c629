"""A step that is learned from late, after the next was decided: what it teaches is about its own turns and nodes."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from specdec.control.controller import Controller
from specdec.control.costs import CostTable
from specdec.control.state import DraftWork, Outcome, Turn
from tests.control.helpers import chain, make_turn


def controller() -> Controller:
    return Controller({"s": False}, CostTable.guess(64), {}, probe_every=16)


def decide(at: Controller, turns: list[Turn], chance: float) -> DraftWork:
    """All draft a chain of three; returns that."""
    trees = [chain([chance, chance, chance], source="s", cells=[0, 0, 0]) for _ in turns]
    at.begin(turns, 0)
    at.free_gate()
    at.choose(trees, 0.0)
    return DraftWork(list(trees), 1, 1.0)


def outcome(work: DraftWork, tokens: list[list[int]]) -> Outcome:
    return Outcome(tokens, 4 * len(tokens), 0.0, 20.0, {"s": work}, 1.0)


def figures(turns: list[Turn]) -> list[tuple[object, ...]]:
    return [(t.control.emitted, t.control.trust.value, t.control.free and astuple(t.control.free)) for t in turns]


def test_late_lessons_are_of_their_own_step() -> None:
    first, second = [make_turn(1, forced=True), make_turn(2, forced=True)], [make_turn(3, forced=True)]
    late, prompt = controller(), controller()
    work = decide(late, first, 0.9)
    decided = late.decided
    following = decide(late, second, 0.5)
    untouched = figures(second)
    late.observe(outcome(work, [[1, 2, 3, 9], [7]]), {}, decided)
    assert figures(second) == untouched
    alone = [make_turn(1, forced=True), make_turn(2, forced=True)]
    prompt.observe(outcome(decide(prompt, alone, 0.9), [[1, 2, 3, 9], [7]]), {})
    assert figures(first) == figures(alone)
    assert first[0].control.emitted == 4
    assert first[0].control.trust.value > first[1].control.trust.value
    late.observe(outcome(following, [[1, 9]]), {}, late.decided)
    assert second[0].control.emitted == 2
    assert figures(first) == figures(alone)


def test_a_lesson_of_other_turns_is_refused() -> None:
    late = controller()
    work = decide(late, [make_turn(1), make_turn(2)], 0.9)
    decide(late, [make_turn(3)], 0.5)
    with pytest.raises(ValueError, match="zip"):
        late.observe(outcome(work, [[1], [2]]), {})
