"""Tokens due: what a step must yield to keep a time per token, or to end before a deadline."""

from __future__ import annotations

import pytest

from specdec.core.types import Request, StoppingParams
from specdec.engine import propose
from specdec.engine.propose import tokens_due
from tests.sequences import new_sequence


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is second 100."""
    monkeypatch.setattr(propose.time, "monotonic", lambda: 100.0)


def due(
    *,
    target: float | None = None,
    since_first_s: float | None = None,
    outputs: int = 1,
    left_s: float | None = None,
    max_tokens: int | None = 50,
    room: int = 20,
    step_ms: float = 40.0,
    resumed: int = 0,
) -> float:
    """Tokens due of a sequence whose first token came ``since_first_s`` ago and whose deadline is in ``left_s``. Of its
    ``outputs`` so many came with it."""
    request = Request("r", (1, 2), stopping=StoppingParams(max_tokens=max_tokens), target_tpot_ms=target)
    sequence = new_sequence(request, max_context=2 + outputs + room)
    sequence.tokens += [0] * outputs
    sequence.n_resumed = resumed
    sequence.first_token_s = None if since_first_s is None else 100.0 - since_first_s
    sequence.deadline = None if left_s is None else 100.0 + left_s
    return tokens_due(sequence, step_ms)


def test_without_an_objective_nothing_is_due() -> None:
    assert due(since_first_s=5.0) == 0.0


def test_before_the_first_token_no_time_per_token_is_kept() -> None:
    assert due(target=1.0, outputs=0) == 0.0


def test_at_pace_a_step_as_long_as_the_target_owes_one_token() -> None:
    assert due(target=40.0, since_first_s=0.0, outputs=1) == pytest.approx(1.0)
    assert due(target=40.0, since_first_s=0.4, outputs=11) == pytest.approx(1.0)


def test_a_step_longer_than_the_target_owes_more() -> None:
    assert due(target=10.0, since_first_s=0.0) == pytest.approx(4.0)


def test_lateness_adds_up() -> None:
    """Eleven tokens were due in 400 ms of 40 each, the first for free; only eight are there."""
    assert due(target=40.0, since_first_s=0.4, outputs=8) == pytest.approx(4.0)


def test_what_was_said_elsewhere_is_not_ahead_of_the_pace() -> None:
    assert due(target=40.0, since_first_s=0.4, outputs=108, resumed=100) == pytest.approx(4.0)


def test_a_sequence_ahead_of_its_pace_owes_nothing() -> None:
    assert due(target=40.0, since_first_s=0.1, outputs=30) == 0.0


def test_a_deadline_asks_for_an_even_share_of_what_is_left() -> None:
    """20 tokens in 400 ms, of which the step takes 40: two of them."""
    assert due(left_s=0.4) == pytest.approx(2.0)
    assert due(left_s=40.0) == pytest.approx(0.02)


@pytest.mark.parametrize("left_s", [0.04, 0.01, 0.0, -5.0])
def test_with_no_time_for_another_step_all_is_due_now(left_s: float) -> None:
    assert due(left_s=left_s) == pytest.approx(20.0)


def test_a_deadline_without_a_length_asks_for_nothing() -> None:
    assert due(left_s=0.1, max_tokens=None) == 0.0


def test_the_harder_objective_counts() -> None:
    assert due(target=10.0, since_first_s=0.0, left_s=0.4) == pytest.approx(4.0)
    assert due(target=1000.0, since_first_s=0.0, left_s=0.4) == pytest.approx(2.0)
