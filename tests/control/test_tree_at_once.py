"""A drafter that grows a whole tree in one forward: priced by the rows of that forward, whatever the tree's depth."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.drafters import DraftCosts
from specdec.control.inputs import DraftDecision, DraftWork, StepInputs
from specdec.control.learning import Estimates
from specdec.control.trace import replay_file
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from tests.control.helpers import chain, make_one, outcome_of, take_step
from tests.draft.test_parallel import parallel_parts
from tests.engine.tiny_engine import run_all, tiny_engine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def linear() -> CostTable:
    return CostTable(ROWS, [0], [[10.0 + n for n in ROWS]])


@pytest.mark.parametrize("sequences", [1, 4])
def test_the_price_is_that_of_new_tokens_and_masks(sequences: int) -> None:
    costs = DraftCosts(linear(), tree_rows=8)
    assert costs.levels(4) == pytest.approx([0.0, 18.0, 26.0, 34.0, 42.0])
    for _ in range(200):  # five new tokens in each sequence
        costs.observe(sequences, 1, 5 * sequences, 10.0 + 12 * sequences, 10.0 + 12 * sequences)
    assert costs.forward_ms(1) == pytest.approx(22.0, rel=0.02)
    assert costs.levels(4) == pytest.approx([0.0, 22.0, 34.0, 46.0, 58.0], rel=0.02)
    assert costs.level.ms(12) == pytest.approx(22.0, rel=0.02)  # the table was right, and stays


@pytest.mark.parametrize(("tree_rows", "decision"), [(8, DraftDecision.ON), (0, DraftDecision.OFF)])
def test_depth_costs_no_forward(tree_rows: int, decision: DraftDecision) -> None:
    """Trees of seven levels hold three tokens, each worth 10 ms; a forward takes 6 ms."""
    flat = CostTable(ROWS, [0], [[6.0 + 0.001 * n for n in ROWS]])
    verify = CostTable(ROWS, [0], [[10.0 + 0.01 * n for n in ROWS]])
    controller = Controller(
        Estimates({"m": True}, verify, {"m": flat}, tree_rows={"m": tree_rows} if tree_rows else {})
    )
    one, forwards = make_one(pending_prefill={"m": (4, 4)}), 1 if tree_rows else 7
    for _ in range(60):
        tree = chain([0.8] * 7, source="m", cells=[0] * 7)
        works = {"m": DraftWork([tree], forwards, 6.0 * forwards, [DraftDecision.ON])}
        step, plan = take_step(controller, [one], works)
        controller.observe(step, plan, outcome_of(plan, [[1, 2, 3, 99]], 10.1, 6.0 * forwards))
    record = one.history.records["m"]
    assert record.levels / record.steps == pytest.approx(forwards)
    restored = Controller.from_dict(json.loads(json.dumps(controller.as_dict())))
    assert restored.estimates.costs["m"].tree_rows == tree_rows
    one.history.records["m"].idle = 0
    (request,) = controller.decide(StepInputs(controller.estimates.prices([0]), [one])).requests
    assert request.decisions == [decision]
    assert request.expansion is None or (request.expansion.cost is None) == bool(tree_rows)


def test_an_engines_decisions_are_repeated(tmp_path: Path) -> None:
    parts = dataclasses.replace(parallel_parts(True), trace_steps=5)
    speculation = parts.config.speculation.model_copy(update={"trace_file": tmp_path / "trace.jsonl"})
    engine = tiny_engine(parts, speculation=speculation)
    modes = (SpeculationMode.AUTO, SpeculationMode.ON)
    asked = [
        Request(f"r{i}", tuple(range(i, 40 + 20 * i)), SamplingParams(temperature=0.5 * (i % 3), seed=i),
                StoppingParams(max_tokens=30 + i, ignore_eos=True), speculation=SpeculationParams(modes[i % 3 == 0]))
        for i in range(6)
    ]  # fmt: skip
    run_all(engine, asked)
    engine.close()
    record = engine.learned()["parallel"]
    assert all(levels == pytest.approx(steps, rel=0.3) for _, steps, _, levels, _ in record.pools)
    report = replay_file(tmp_path / "trace.jsonl")
    assert report.steps > 20
    assert report.differences == []
