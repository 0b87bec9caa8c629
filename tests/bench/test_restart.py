"""The benchmark of a restart, with real servers: the second one has the prompt of the first from disk."""

from __future__ import annotations

from bench.restart import RestartPlan, measure_restart
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.fuzz.fuzzed_server import CACHE


async def test_a_restarted_server_has_the_prompt_and_answers_the_same() -> None:
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=2048, max_batch=4, max_context=448,
        speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(log_calls=False))
    notes: list[str] = []
    plan = RestartPlan(tokens=400, streams=2, output=300, rounds=1)  # the streams overlap on a busy machine too
    found = await measure_restart(config, plan, notes.append)
    assert (found["same_tokens"], found["cached_tokens"]) == (True, 384)
    assert found["step_plain_ms"]["n"] > 0
    assert found["step_writing_ms"]["n"] > 0
    assert len(notes) == 3
