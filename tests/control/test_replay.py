"""Replay: the controller alone repeats the decisions of a recorded run, and detects changes."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.params import DEFAULT_PARAMS
from specdec.control.trace import read_trace, replay_file
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine import propose
from specdec.engine.engine import Engine
from specdec.engine.profile_costs import StepCosts
from specdec.errors import ConfigError
from tests.engine.tiny_engine import run_all, tiny_engine, tiny_parts

Line = dict[str, Any]


def _keep_time(engine: Engine, now: list[float]) -> None:
    """Replace all clocks by ``now``: a proposal takes 2 ms, and verifying 3 ms."""
    start = engine._verifier.start

    def clock() -> float:
        now[0] += 2e-3
        return now[0]

    def verify(*step: Any) -> Any:
        now[0] += 0.001
        return start(*step)

    engine._verifier.start = verify  # type: ignore[method-assign]
    engine._step._clock = engine._speculation.manager._clock = engine._speculation.drafting._clock = clock


@functools.cache
def recorded() -> tuple[str, int]:
    """A trace of a run that mixes modes, temperatures, drafters and objectives, and its tokens."""
    path = Path(tempfile.mkdtemp(prefix="specdec-test-")) / "trace.jsonl"
    speculation = tiny_parts().config.speculation.model_copy(update={"trace_file": path})
    now = [0.0]
    engine = tiny_engine(replace(tiny_parts(), clock=lambda: now[0], trace_steps=7), speculation=speculation)
    _keep_time(engine, now)
    modes = [SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF]
    requests = [
        Request(
            f"r{i}",
            tuple([7 + i % 4, 8, 9, 10] * (4 + 3 * i)),
            SamplingParams(temperature=(0.0, 0.4, 1.0)[i % 3], seed=i, n=1 + (i == 2)),
            StoppingParams(max_tokens=20 + i, ignore_eos=True),
            speculation=SpeculationParams(modes[i % 3] if i < 6 else SpeculationMode.AUTO, (None, ("suffix",))[i == 7]),
            target_tpot_ms=(None, 1e-6, 1e6)[i % 3],
            deadline_s=600.0 if i == 5 else None,
        )
        for i in range(10)
    ]
    with patch.object(propose, "time", SimpleNamespace(monotonic=lambda: now[0])):
        run_all(engine, requests)
    assert len(engine.trace(100)) == 7
    engine.close()
    return path.read_text(), sum(20 + i for i in range(10)) + 22


def steps_of(text: str) -> list[Line]:
    return [json.loads(line) for line in text.splitlines()[1:]]


def altered(tmp_path: Path, change: Callable[[Line], bool]) -> Path:
    """The trace with the last step changed that ``change`` can be made on; it returns whether it was. What is learned
    from an earlier one may change the decisions after it."""
    lines = recorded()[0].splitlines()
    for i in range(len(lines) - 1, 0, -1):
        values = json.loads(lines[i])
        if values["replay"] and change(values["replay"]):
            lines[i] = json.dumps(values)
            break
    else:
        raise AssertionError("no step to change")
    path = tmp_path / "altered.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_same_inputs_give_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(recorded()[0])
    report = replay_file(path)
    assert report.differences == []
    assert report.steps > 30


def test_the_recorded_run_is_worth_replaying() -> None:
    """Modes, drafters and objectives of all kinds took part, and tokens are all accounted for."""
    text, tokens = recorded()
    steps = steps_of(text)
    decisions = {d for s in steps if s["replay"] for own in s["replay"]["decisions"].values() for d in own}
    assert {"forced", "free", ""} <= decisions
    assert decisions & {"on", "probe"}
    assert {d["name"] for s in steps for d in s["drafters"]} == {"suffix", "model"}
    assert any(s["sequences"] > 3 for s in steps)
    assert any(one["due"] > 1 for s in steps if s["replay"] for one in s["replay"]["sequences"])
    assert any(any(s["replay"]["kept"]) for s in steps if s["replay"])
    assert sum(s["realised_tokens"] for s in steps) == tokens
    assert [s["step"] for s in steps] == list(range(len(steps)))


def test_figures_of_a_step_are_consistent() -> None:
    for step in steps_of(recorded()[0]):
        assert step["rows"] == step["prefill_rows"] + step["sequences"] + step["budget"]
        assert 0 <= step["budget"] <= step["candidates"]
        assert sum(d["accepted"] for d in step["drafters"]) >= step["realised_tokens"] - step["sequences"]
        assert step["predicted_tokens"] >= step["sequences"]
        for drafter in step["drafters"]:
            assert drafter["accepted"] <= drafter["verified"]


def flip_kept(replay: Line) -> bool:
    for kept in replay["kept"]:
        if kept:
            kept.pop()
            return True
    return False


def flip_decision(replay: Line) -> bool:
    for own in replay["decisions"].values():
        for i, decision in enumerate(own):
            if decision in ("on", "probe"):
                own[i] = "off"
                return True
    return False


def flip_lookup(replay: Line) -> bool:
    for own in replay["decisions"].values():
        if "free" in own:
            own[own.index("free")] = "off"
            return True
    return False


@pytest.mark.parametrize("change", [flip_kept, flip_decision, flip_lookup])
def test_a_changed_decision_is_detected(tmp_path: Path, change: Callable[[Line], bool]) -> None:
    report = replay_file(altered(tmp_path, change))
    assert len(report.differences) == 1
    assert report.differences[0].startswith("step ")


def another_speed(header: Line) -> None:
    verify = header["controller"]["verify"]
    verify["ms"] = [[1e-3 * 4**i for i, _ in enumerate(own)] for own in verify["ms"]]


def test_decisions_depend_on_the_recorded_inputs(tmp_path: Path) -> None:
    """With another measured cost than was recorded, later decisions come out otherwise."""
    lines = recorded()[0].splitlines()
    header = json.loads(lines[0])
    another_speed(header)
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert replay_file(path).differences


def test_a_changed_outcome_shows_in_later_decisions(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = recorded()[0].splitlines()
    for i in range(1, len(lines)):
        values = json.loads(lines[i])
        if values["replay"]:
            values["replay"]["outcome"]["verify_ms"] *= 1000  # then drafting would have paid throughout
            lines[i] = json.dumps(values)
    path.write_text("\n".join(lines) + "\n")
    assert replay_file(path).differences


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    text = recorded()[0]
    path.write_text(text[:-30])
    whole = tmp_path / "whole.jsonl"
    whole.write_text(text)
    report = replay_file(path)
    assert report.differences == []
    assert replay_file(whole).steps - report.steps in (0, 1)
    assert len(list(read_trace(path)[1])) == len(steps_of(text)) - 1


@pytest.mark.parametrize("broken", ["header", "step"])
def test_bug_a_trace_without_replay_data_is_rejected(tmp_path: Path, broken: str) -> None:
    lines = recorded()[0].splitlines()
    if broken == "header":
        lines[0] = '{"specdec_trace":5,"controller":{}}'
    else:
        i = next(i for i, line in enumerate(lines) if i and json.loads(line)["replay"])
        values = json.loads(lines[i])
        del values["replay"]["kept"]
        lines[i] = json.dumps(values)
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError):
        replay_file(path)


def test_an_engine_and_its_replay_have_the_same_constants() -> None:
    costs = StepCosts(CostTable([1, 2, 8], [0], [[1.0, 2.0, 20.0]]).as_dict())
    params = replace(DEFAULT_PARAMS, row_price_rows=2)
    ours = tiny_engine(replace(tiny_parts(), control_params=params, costs=costs))._speculation.controller
    again = Controller.from_dict(ours.as_dict())
    assert again.estimates.verify.row_ms(1) == ours.estimates.verify.row_ms(1)
