"""A server that starts again has its prompts from disk."""

from __future__ import annotations

from pathlib import Path

from bench.local_server import LocalServer
from specdec.client import Client
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from specdec.core.types import SamplingParams, StoppingParams
from tests.fuzz.fuzzed_server import CACHE


async def test_a_restarted_server_has_the_prompt_from_disk_and_answers_the_same(tmp_path: Path) -> None:
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=2048, max_batch=4, max_context=448,
        kv_disk_bytes=1 << 30, kv_disk_folder=tmp_path, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=None, log_calls=False))
    prompt, greedy = [1 + i % 200 for i in range(400)], SamplingParams(temperature=0)
    stopping, answers = StoppingParams(max_tokens=16, ignore_eos=True), []
    for _ in range(2):
        async with LocalServer(config) as server, Client(server.grpc_address) as client:
            answers.append(await client.generate(prompt, sampling=greedy, stopping=stopping))
    cold, restarted = (answer.samples[0] for answer in answers)
    assert (cold.usage.cached_tokens, restarted.usage.cached_tokens) == (0, 384)
    assert restarted.token_ids == cold.token_ids
