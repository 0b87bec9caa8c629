"""What the controller takes from steps, where the parts by themselves would be told something else."""

from __future__ import annotations

import pytest

from specdec.control.controller import Controller
from specdec.control.costs import CostTable
from specdec.control.state import DraftWork, Outcome, Turn
from specdec.tree import TokenTree
from tests.control.helpers import chain, make_turn

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROW_MS = 4.0


def make_controller() -> Controller:
    """A target whose rows take as long as reading its weights, and a drafter of a millisecond a level."""
    verify = CostTable(ROWS, [0], [[ROW_MS * n for n in ROWS]])
    return Controller({"m": True}, verify, {"m": CostTable(ROWS, [0], [[1.0] * len(ROWS)])}, 16)


def step(
    controller: Controller, turns: list[Turn], trees: list[TokenTree], tokens: list[list[int]], draft_ms: float = 1.0,
    prefill_rows: int = 0, verify_ms: float | None = None, decision: str = "on",
) -> None:  # fmt: skip
    """One step in which the drafter proposed ``trees``; as long as the table says where nothing else is given."""
    controller.begin(turns, prefill_rows)
    choice = controller.choose(trees, draft_ms)
    rows = len(turns) + prefill_rows + choice.budget
    took = ROW_MS * rows if verify_ms is None else verify_ms
    work = {"m": DraftWork(list(trees), 1, draft_ms)} if decision else {}
    decisions = {"m": [decision] * len(turns)} if decision else {}
    controller.observe(Outcome(tokens, rows, 0.0, took, work, draft_ms), decisions)


def test_bug_prompts_that_are_cheaper_by_the_row_say_nothing_of_rows_that_sample() -> None:
    controller = make_controller()
    turns = [make_turn(i) for i in range(8)]
    for _ in range(30):
        step(controller, turns, [TokenTree(0)] * 8, [[1]] * 8, 0.0, 100, ROW_MS * (8 + 0.6 * 100), decision="")
    assert controller.verify.ms(8) == pytest.approx(ROW_MS * 8)
    controller.begin(turns, 100)
    assert controller.predicted_ms(0) == pytest.approx(ROW_MS * (8 + 0.6 * 100), rel=0.05)


@pytest.mark.parametrize(("decision", "brings"), [("on", False), ("probe", True)])
def test_bug_a_node_that_was_not_verified_brought_nothing_though_it_was_right(decision: str, brings: bool) -> None:
    """Its chance is far below what a row costs, and it always is what the target says next."""
    controller, turn = make_controller(), make_turn()
    for _ in range(60):
        step(controller, [turn], [chain([0.05], tokens=[7], source="m", cells=[0])], [[7]], decision=decision)
    gain = turn.control.usage["m"].gain
    assert gain == pytest.approx(1.0 if brings else 0.0, abs=0.1)


def test_bug_time_is_never_worth_less_than_plain_decoding_earns_with_it() -> None:
    """Steps in which drafting takes three times as long as the forward, for nothing."""
    controller, turn = make_controller(), make_turn()
    for _ in range(60):
        step(controller, [turn], [TokenTree(0)], [[1]], draft_ms=3 * ROW_MS)
    controller.begin([turn], 0)
    assert controller.rate == pytest.approx(1 / ROW_MS)
