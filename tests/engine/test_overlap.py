"""The controller learns from a step while the next is verified: in order, once each, and recorded in the trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.control.prefill_pace import PrefillPace, StepTimes
from specdec.control.trace import StepTrace, replay_file
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine import step
from specdec.engine.engine import Engine
from tests.engine.late_verifier import LateVerifier
from tests.engine.tiny_engine import drain, run_all, tiny_engine, tiny_parts, tokens_of

MODES = (SpeculationMode.AUTO, SpeculationMode.ON, SpeculationMode.OFF)


def requests(count: int = 6, base: int = 7, tokens: int = 16) -> list[Request]:
    """Of all modes; other ones for another ``base``, which the drafters, shared by all tests here, have not read."""
    return [
        Request(
            f"r{i}",
            tuple([base + i % 4, base + 1, base + 2, base + 3] * (4 + 6 * i)),
            SamplingParams(temperature=(0.0, 0.5)[i % 2], seed=i),
            StoppingParams(max_tokens=tokens + 3 * i, ignore_eos=True),
            speculation=SpeculationParams(MODES[i % 3] if i < 3 else SpeculationMode.AUTO),
        )
        for i in range(count)
    ]


def late_engine(log: list[str], fails_at: int = -1, trace_file: Path | None = None, **changes: Any) -> Engine:
    parts = tiny_parts()
    speculation = parts.config.speculation.model_copy(update={"trace_file": trace_file})
    late = dataclasses.replace(parts, verifier=LateVerifier(parts, log, fails_at))
    return tiny_engine(late, speculation=speculation, **changes)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A log of the verifier's calls and of when a step is learned from and traced."""
    calls: list[str] = []
    original = step.step_trace

    def traced(*arguments: Any) -> StepTrace:
        calls.append("learn")
        return original(*arguments)

    monkeypatch.setattr(step, "step_trace", traced)
    return calls


def test_a_step_is_learned_from_while_the_next_is_verified(log: list[str]) -> None:
    engine = late_engine(log)
    run_all(engine, requests())
    at = [i for i, call in enumerate(log) if call == "learn"]
    assert len(at) > 15
    assert all(log[i - 1 : i + 2] == ["start", "learn", "wait"] for i in at[:-1])
    assert log[-2:] == ["wait", "learn"]  # the engine is idle
    assert [step.step for step in engine.trace(1000)] == list(range(len(at)))


def test_the_prefill_pace_learns_from_a_step_while_the_next_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once from every step, whether it sampled or not."""
    log: list[str] = []
    monkeypatch.setattr(PrefillPace, "observe", lambda pace, step: log.append("observe"))
    run_all(late_engine(log), requests())
    assert len(log) > 45
    assert log == ["start", "wait", *["start", "observe", "wait"] * (len(log) // 3 - 1), "observe"]


def test_only_the_time_of_one_forward_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that only reads prompts is not waited for, so the next one's time includes it."""
    seen: list[tuple[bool, bool]] = []
    observe = PrefillPace.observe

    def noted(pace: PrefillPace, step: StepTimes) -> None:
        seen.append((step.decodes > 0, step.forward_ms > 0))
        observe(pace, step)

    monkeypatch.setattr(PrefillPace, "observe", noted)
    engine = late_engine([], prefix_cache=False)
    for request in requests(3, tokens=6):
        run_all(engine, [dataclasses.replace(request, prompt_ids=request.prompt_ids * 6)])
    samples = [decodes for decodes, _ in seen]
    assert samples.count(False) > 5
    expected = [now and before for before, now in zip([True, *samples], samples, strict=False)]
    assert [timed for _, timed in seen] == expected
    traced = [step.realised_verify_ms > 0 for step in engine.trace(1000)]
    assert traced == [timed for decodes, timed in seen if decodes]


def test_a_synchronous_step_is_learned_from_immediately() -> None:
    engine = tiny_engine()
    engine.submit(requests(1, tokens=40)[0])
    seen = 0
    while engine.has_work():
        before = engine.last_step
        engine.step()
        if engine.last_step is not before and engine.last_step is not None:
            seen += bool(engine.last_step.deltas)
        assert len(engine.trace(1000)) == seen
    assert seen > 3


def test_overlap_changes_no_token() -> None:
    expected, found = run_all(tiny_engine(), requests()), run_all(late_engine([]), requests())
    for request in requests():
        assert tokens_of(found, request.request_id) == tokens_of(expected, request.request_id)


def test_a_trace_replays_in_the_recorded_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = late_engine([], trace_file=path)
    run_all(engine, requests(6, base=60, tokens=60))
    run_all(engine, requests(3, base=80, tokens=60))
    engine.close()
    report = replay_file(path)
    assert report.differences == []
    assert report.steps > 12
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    late = [line["replay"]["late"] for line in lines[1:] if line["replay"]]
    assert late.count(True) > 8
    assert late.count(False) >= 2  # the engine had been idle
    for line in lines[1:]:
        if line["replay"]:
            line["replay"]["late"] = False
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert replay_file(path).differences


def test_without_overlap_no_step_is_late(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    speculation = tiny_parts().config.speculation.model_copy(update={"trace_file": path})
    engine = tiny_engine(speculation=speculation)
    run_all(engine, requests(3))
    engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["replay"]["late"] for line in lines[1:] if line["replay"]} == {False}
    assert replay_file(path).differences == []


@pytest.mark.parametrize("fails_at", [2, 6])
def test_a_device_error_loses_no_observation(fails_at: int, log: list[str]) -> None:
    engine = late_engine(log, fails_at)
    for request in requests(3):
        engine.submit(request)
    with pytest.raises(RuntimeError, match="the device is gone"):
        drain(engine)
    assert log.count("wait") == fails_at
    assert log[-2:] == ["start", "learn"]
    learned = log.count("learn")
    engine.close()
    assert log.count("learn") == learned == len(engine.trace(1000))


@pytest.mark.parametrize("leaves", ["abort", "close", "swap"])
def test_no_observation_is_pending_after_an_early_end(leaves: str, log: list[str], tmp_path: Path) -> None:
    engine = late_engine(log, trace_file=tmp_path / "trace.jsonl")
    engine.submit(dataclasses.replace(requests(1)[0], stopping=StoppingParams(max_tokens=80, ignore_eos=True)))
    while log.count("learn") < 3:
        engine.step()
    assert log[-1] == "wait"
    before = log.count("learn")
    if leaves == "swap":
        engine.swap_draft(None)
    elif leaves == "close":
        engine.close()
    else:
        engine.abort("r0")
        drain(engine)
    assert log.count("learn") == before + 1
    drain(engine)
    engine.close()
    assert replay_file(tmp_path / "trace.jsonl").differences == []


def test_sequences_that_start_and_end_meanwhile_keep_their_tokens() -> None:
    engine, expected, found, steps = late_engine([]), run_all(tiny_engine(), requests(3)), [], 0
    for request in requests(3):
        engine.submit(request)
    while engine.has_work():
        steps += 1
        if steps % 5 == 0:
            engine.preempt_newest()
        found += engine.step()
    for request in requests(3):
        assert tokens_of(found, request.request_id) == tokens_of(expected, request.request_id)
