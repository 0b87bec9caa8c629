"""An engine is killed and stopped for real; what is wrong is called wrong."""

from __future__ import annotations

from typing import Any

import pytest

from bench.faults import CUT, HUNG, UNAVAILABLE, FaultsPlan, ending_of, measure_faults, wrong_with
from bench.frontend.frontend_bench import FACTORY, TOKENIZER
from bench.frontend.paced_engine import paced_target
from specdec.config import Config, EngineConfig, ServerConfig


def run_of(**fields: Any) -> dict[str, Any]:
    good = {"way": "kill", "streams": {UNAVAILABLE: 16}, "beside_load_s": 1.0, "at_rest": True}
    return good | fields


def test_what_is_wrong_is_named() -> None:
    plan = FaultsPlan(limit_s=5.0, heartbeat_s=2.0)
    assert wrong_with(run_of(), plan) == []
    assert wrong_with(run_of(streams={UNAVAILABLE: 3, "complete": 13}), plan) == []
    assert wrong_with(run_of(way="hang", beside_load_s=6.9), plan) == []
    assert "6.9" in wrong_with(run_of(beside_load_s=6.9), plan)[0]
    assert "7.1" in wrong_with(run_of(way="hang", beside_load_s=7.1), plan)[0]
    for ending in (HUNG, CUT, "INTERNAL: no"):
        assert ending in wrong_with(run_of(streams={UNAVAILABLE: 1, ending: 1}), plan)[0]
    assert "nothing was tried" in wrong_with(run_of(streams={"complete": 16}), plan)[0]
    assert "still held" in wrong_with(run_of(at_rest=False), plan)[0]


@pytest.mark.parametrize(
    ("status", "data", "ending"),
    [
        (503, "", UNAVAILABLE),
        (500, "", "status 500"),
        (200, 'data: {"choices":[]}\n\ndata: {"error":{"code":"engine_unavailable","message":"m"}}\n\n', UNAVAILABLE),
        (200, 'data: {"error":{"code":"internal","message":"m"}}\n\n', "error internal: m"),
        (200, 'data: {"choices":[]}\n\ndata: [DONE]\n\n', "complete"),
        (200, 'data: {"choices":[]}\n\n', CUT),
        (200, "", CUT),
    ],
)
def test_how_a_stream_of_events_ended(status: int, data: str, ending: str) -> None:
    assert ending_of(status, data) == ending


async def test_a_real_server_whose_engine_hangs_serves_again() -> None:
    engine = EngineConfig(target=paced_target(20.0))
    plan = FaultsPlan(ways=("hang",), times=1, streams=3, max_tokens=10_000, heartbeat_s=4.0, limit_s=60.0)
    notes: list[str] = []
    config = Config(engine=engine, server=ServerConfig())
    found = await measure_faults(config, plan, notes.append, factory=FACTORY, tokenizer=TOKENIZER)
    assert found["ok"], found["faults"]
    assert [(run["way"], run["streams"]) for run in found["runs"]] == [(way, {UNAVAILABLE: 6}) for way in plan.ways]
    (run,) = found["runs"]
    assert 0 <= run["load_s"] < run["serving_again_s"]
    assert run["streams_ended_s"] > 0.5  # it was the silence that was noticed
    assert len(notes) == 1
