"""Tokens due: how many a step must yield to keep a time per token, or to end before a deadline."""

from __future__ import annotations

from typing import Any

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
    """Tokens due of a sequence whose first token arrived ``since_first_s`` ago and whose deadline is in ``left_s``. The
    first event had that many of its ``outputs``."""
    request = Request("r", (1, 2), stopping=StoppingParams(max_tokens=max_tokens), target_tpot_ms=target)
    sequence = new_sequence(request, max_context=2 + outputs + room)
    sequence.tokens += [0] * outputs
    sequence.n_resumed = resumed
    sequence.first_token_s = None if since_first_s is None else 100.0 - since_first_s
    sequence.deadline = None if left_s is None else 100.0 + left_s
    return tokens_due(sequence, step_ms)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"since_first_s": 5.0}, 0.0, id="no objective"),
        pytest.param({"target": 1.0, "outputs": 0}, 0.0, id="no time per token before the first token"),
        pytest.param({"target": 40.0, "since_first_s": 0.0}, 1.0, id="at pace, a step as long as the target"),
        pytest.param({"target": 40.0, "since_first_s": 0.4, "outputs": 11}, 1.0, id="at pace, later"),
        pytest.param({"target": 10.0, "since_first_s": 0.0}, 4.0, id="a step longer than the target"),
        pytest.param({"target": 40.0, "since_first_s": 0.4, "outputs": 8}, 4.0, id="three tokens late"),
        pytest.param(
            {"target": 40.0, "since_first_s": 0.4, "outputs": 108, "resumed": 100},
            4.0,
            id="resumed tokens do not count",
        ),
        pytest.param({"target": 40.0, "since_first_s": 0.1, "outputs": 30}, 0.0, id="ahead of its pace"),
        pytest.param({"left_s": 0.4}, 2.0, id="an even share of 20 tokens in 400 ms"),
        pytest.param({"left_s": 40.0}, 0.02, id="an even share, much time left"),
        *(pytest.param({"left_s": s}, 20.0, id=f"all is due with {s} s left") for s in (0.04, 0.01, 0.0, -5.0)),
        pytest.param({"left_s": 0.1, "max_tokens": None}, 0.0, id="a deadline without a length"),
        pytest.param({"target": 10.0, "since_first_s": 0.0, "left_s": 0.4}, 4.0, id="the target is harder"),
        pytest.param({"target": 1000.0, "since_first_s": 0.0, "left_s": 0.4}, 2.0, id="the deadline is harder"),
    ],
)
def test_tokens_due(given: dict[str, Any], expected: float) -> None:
    assert due(**given) == pytest.approx(expected)
