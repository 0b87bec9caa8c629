"""Traces, profiles and distributions of drafting: files round-trip, and errors are named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.plan.arrivals import Traffic, at_rate, drawn_requests, read_requests
from cluster.plan.drafts import DraftLaw
from cluster.plan.export import export_profile, fit_request_ms, fit_steps
from cluster.plan.profile import DraftedStep, read_profile
from cluster.plan.simulate import FleetPlan, simulate
from specdec.config import EngineConfig, ServerConfig
from specdec.control.trace import TraceWriter
from specdec.core.types import StepTrace
from specdec.errors import ConfigError
from specdec.load.arrivals import Arrivals
from tests.cluster.plan.profiles import forward_ms, profile
from tests.fake_engine import INFO

TRACE = [
    {"offset_s": 0.5, "prompt_ids": [*range(100)], "max_tokens": 64, "was_tokens": 7, "was_first_s": 0.2},
    {
        "offset_s": 0.0,
        "prompt_blocks": ["aa", "bb"],
        "prompt_tokens": 130,
        "max_tokens": 9,
        "session": "s",
        "salt": "t",
    },
    {"offset_s": 1.0, "prompt_ids": [*range(90)], "max_tokens": 3},
]


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_captured_trace_is_replayed(tmp_path: Path) -> None:
    named, whole, short = read_requests(written(tmp_path / "t", *TRACE), speed=2.0)
    assert (named.at_s, whole.at_s, short.at_s) == (0.0, 0.25, 0.5)
    assert (named.session, named.salt, named.output_tokens) == ("s", "t", 9)
    assert (whole.output_tokens, whole.was_first_s) == (7, 0.2)
    assert whole.request(1).prompt_ids == tuple(range(100))
    ids = named.request(2).prompt_ids
    assert len(ids) == 130
    assert len(set(ids[:64])) == len(set(ids[64:128])) == len(set(ids[128:])) == 1
    assert ids[:128] == named.request(3).prompt_ids[:128]
    assert ids[128:] != named.request(3).prompt_ids[128:]
    run = simulate(FleetPlan(profile(), 1), [named, whole, short])
    assert run.records[2].cached_tokens == 89  # a page, and the part of the next one that the other prompt leaves


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 1: .*JSON"),
        ("[]", "line 1: .*object"),
        ('{"offset_s": -1, "prompt_ids": [1]}', "offset_s"),
        ('{"offset_s": 0, "prompt": "text", "max_tokens": 1}', "specdec serve --capture"),
        ('{"offset_s": 0, "prompt_ids": [-1], "max_tokens": 1}', "prompt_ids"),
        ('{"offset_s": 0, "prompt_ids": [1], "max_tokens": 0}', "max_tokens"),
        ('{"offset_s": 0, "prompt_blocks": ["a"], "prompt_tokens": 63, "max_tokens": 1}', "prompt_tokens"),
        ('{"offset_s": 0, "prompt_blocks": 7, "prompt_tokens": 63, "max_tokens": 1}', "prompt_blocks"),
        ('{"offset_s": 0, "prompt_ids": [1], "max_tokens": 1, "session": 3}', "session"),
        ('{"offset_s": 0, "prompt_ids": [1], "max_tokens": 1, "was_first_s": "x"}', "was_first_s"),
        ("", "no request"),
    ],
)
def test_an_invalid_trace_is_named(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "t"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=word):
        read_requests(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "nowhere")


def test_a_trace_of_several_models_is_refused(tmp_path: Path) -> None:
    """A profile describes one model."""
    path = tmp_path / "t"
    lines = [{"offset_s": n, "prompt_ids": [1], "max_tokens": 1, "model": model} for n, model in enumerate("ab")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"requests of several models \('a', 'b'\); keep the lines of one"):
        read_requests(path)


def test_generated_traffic_matches_its_parameters() -> None:
    traffic = Traffic(400, 50, shared_tokens=64, sessions=5, session_tokens=128)
    requests = drawn_requests(Arrivals(100.0, 40.0), traffic, 0)
    assert sum(one.prompt_tokens for one in requests) / len(requests) == pytest.approx(400, rel=0.05)
    assert sum(one.output_tokens for one in requests) / len(requests) == pytest.approx(50, rel=0.05)
    assert len({one.session for one in requests}) == 5
    assert len({one.blocks[0] for one in requests}) == 1
    assert len({one.blocks for one in requests}) == 5
    again = at_rate(requests[:3], Arrivals(10.0, 1.0, shape=None), 0)
    assert [one.at_s for one in again] == pytest.approx([n / 10 for n in range(10)])
    assert [one.output_tokens for one in again[:3]] == [one.output_tokens for one in again[3:6]]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"session_tokens": 64}, "session_tokens"),
        ({"prompt_tokens": 64, "shared_tokens": 64}, "exceed 64"),
    ],
)
def test_invalid_traffic_is_named(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Traffic(**given)


def test_a_profile_round_trips(tmp_path: Path) -> None:
    path, one = tmp_path / "p.json", profile(drafted=[(4, 3)])
    path.write_text(one.model_dump_json())
    assert read_profile(path) == one


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"specdec_plan": 7}, "version 7 is not supported"),
        ({"specdec_plan": 1, "memory": {}}, "version 1 is not supported, only 2; export it again"),
        ({"verify": {"rows": [1]}}, "not a cost table"),
        ({"verify": {"rows": [1], "contexts": [0], "ms": [[-1]], "measured": True}}, "positive"),
        ({"noise": [0.0]}, "noise"),
        ({"colour": "red"}, "colour"),
        ({"drafted": [{"sequences": [[1, 3]]}]}, "at most n \\+ 1"),
        ({"drafted": [{"sequences": [[64, 1]]}]}, "drafted.*less than or equal to 63"),
        ({"limits": {}}, "limits.max_batch"),
    ],
)
def test_an_invalid_profile_is_named(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile().model_dump() | change))
    with pytest.raises(ConfigError, match=word):
        read_profile(path)


def test_invalid_profile_files_are_named(tmp_path: Path) -> None:
    for content, word in ((b"\xff", "Invalid JSON"), (b"[" * 100_000, "Invalid JSON"), (b"7", "profile")):
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(ConfigError, match=word):
            read_profile(tmp_path / "p")


def test_inconsistent_limits_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text(profile(prefill_chunk=512).model_dump_json())
    with pytest.raises(ConfigError, match="prefill_chunk must not exceed"):
        read_profile(path)


def test_a_step_is_sampled_from_those_of_its_size() -> None:
    law = DraftLaw([DraftedStep(sequences=((n, 1),) * size) for n, size in ((1, 1), (2, 4), (3, 16))])
    sizes = {n: len(law.draw(n, random.Random(0)).sequences) for n in (1, 2, 3, 4, 9, 11, 30)}
    assert sizes == {1: 1, 2: 1, 3: 4, 4: 4, 9: 4, 11: 16, 30: 16}


def step(number: int, at_ms: float, rows: int, ms: float, **changes: Any) -> StepTrace:
    values: dict[str, Any] = {
        "step": number, "at_s": at_ms / 1e3, "sequences": 1, "rows": rows, "prefill_rows": rows - 1, "context": 0.0,
        "candidates": 0, "budget": 0, "predicted_tokens": 1.0, "realised_tokens": 1, "predicted_draft_ms": 0.0,
        "realised_draft_ms": 0.25, "predicted_verify_ms": 0.0, "realised_verify_ms": ms, "plan_ms": 0.25,
        "commit_ms": 0.5, "control_ms": 0.0,
    }  # fmt: skip
    return StepTrace(**(values | changes))


def decisions(path: Path, reading: float, rows: float, **changes: Any) -> Path:
    """Steps of a server whose forwards take these times longer for their first row and for the others; 0.5 ms between
    steps."""
    writer, at_ms = TraceWriter(path, {"verify": profile().verify}), 0.0
    for number in range(400):
        n = (1, 8, 64, 200)[number % 4]
        ms = reading * forward_ms(1) + rows * (forward_ms(n) - forward_ms(1))
        writer.write(step(number, at_ms, n, ms, **changes))
        at_ms += ms + 1.0 + 0.5
    writer.close()
    return path


def test_speeds_and_overheads_are_estimated_from_a_trace(tmp_path: Path) -> None:
    found = fit_steps(decisions(tmp_path / "d.jsonl", reading=1.5, rows=0.8))
    assert found["verify"]["ms"][0] == pytest.approx([15.0, 15.0 + 0.8 * 25.5], rel=1e-3)
    assert found["noise"] == pytest.approx([1.0] * len(found["noise"]), abs=1e-3)
    assert found["drafted"] == ()
    assert found["overheads"].step_ms == pytest.approx(0.25 + 0.25 + 0.5 + 0.5)


def test_draft_gains_are_estimated_from_a_trace(tmp_path: Path) -> None:
    replay = {"kept": [[1, 2, 3], []], "outcome": {"tokens": [[5, 6], [7]]}}
    changes = {"sequences": 2, "budget": 3, "realised_tokens": 3, "prefill_rows": 0}
    of_replay = fit_steps(decisions(tmp_path / "replay", 1.0, 1.0, **changes, replay=replay))["drafted"]
    assert {each.sequences for each in of_replay} == {((3, 2), (0, 1))}
    assert {each.draft_ms for each in of_replay} == {0.25}


def test_a_step_without_a_decision_drafted_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "d", {"verify": profile().verify})
    replay = {"kept": [[1]], "outcome": {"tokens": [[5, 6]]}}
    for number in range(30):
        writer.write(step(2 * number, 100.0 * number, 2, 20.0, prefill_rows=0, budget=1, replay=replay))
        writer.write(step(2 * number + 1, 100.0 * number + 50, 2, 20.0, prefill_rows=0, sequences=2))
    writer.close()
    assert {each.sequences for each in fit_steps(tmp_path / "d")["drafted"]} == {((1, 2),), ((0, 1), (0, 1))}


def test_a_trace_of_too_few_steps_is_named(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "d", {"verify": profile().verify})
    writer.write(step(0, 0.0, 1, 1.0))
    writer.close()
    with pytest.raises(ConfigError, match="holds 1 steps"):
        fit_steps(tmp_path / "d")


def test_a_folder_without_captures_is_named_with_its_option(tmp_path: Path) -> None:
    parts: Any = SimpleNamespace(config=EngineConfig(), info=INFO)
    trace = decisions(tmp_path / "d", 1.0, 1.0)
    with pytest.raises(ConfigError, match=f"^--captured: {tmp_path} has no captured requests"):
        export_profile(parts, ServerConfig(), "cpu", trace, tmp_path)


def test_time_outside_the_engine_is_the_remaining_wait() -> None:
    requests = drawn_requests(Arrivals(2.0, 5.0), Traffic(100, 4, spread=False), 0)
    fleet = FleetPlan(profile(), 1)
    assert fit_request_ms(fleet, requests, forward_ms(100) + 6.5) == pytest.approx(6.5)
    assert fit_request_ms(fleet, requests, 1.0) == 0.0
