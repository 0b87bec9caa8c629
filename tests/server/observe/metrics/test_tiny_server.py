"""A server over a real engine: its metrics match its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engine_process import DEFAULT_FACTORY
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import (
    Finished,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.models.resolve import load_tokenizer
from tests.models.tiny import make_tiny_model
from tests.server.http.harness import Server, running
from tests.server.observe.metrics.scrape import Scrape

CACHE = Path("~/.cache/specdec").expanduser()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny")
    target, draft = make_tiny_model("llama", folder / "target"), make_tiny_model("llama", folder / "draft", seed=5)
    engine = EngineConfig(
        target=str(target), draft=str(draft), threads=1, cache_dir=CACHE, kv_tokens=64 * 20, max_batch=4,
        max_step_rows=96, prefill_chunk=64, max_context=448, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    with running(lambda: load_tokenizer(str(target), CACHE), factory=DEFAULT_FACTORY, engine=engine) as found:
        yield found


async def ask(server: Server, request: Request) -> list[RequestEvent]:
    async with server.serving.client.generate(request) as stream:
        return [event async for event in stream]


def make_request(name: str, mode: SpeculationMode, n: int, prompt: range) -> Request:
    stopping = StoppingParams(max_tokens=24, ignore_eos=True)
    speculation = SpeculationParams(mode)
    return Request(name, tuple(prompt), SamplingParams(seed=3, n=n), stopping, speculation=speculation)


def test_the_metrics_match_the_answers(server: Server) -> None:
    prompt = range(5, 135)
    requests = [
        make_request("a", SpeculationMode.ON, 1, prompt),
        make_request("b", SpeculationMode.ON, 2, prompt),
        make_request("c", SpeculationMode.OFF, 1, range(200, 240)),
    ]
    finished = [
        event for request in requests for event in server.run(ask(server, request)) if isinstance(event, Finished)
    ]
    assert len(finished) == 4
    first_of_each = {end.request_id: end for end in reversed(finished) if end.index == 0}
    idle = server.comes_to(lambda: server.load.running_requests == 0 and server.load.steps > 0)
    assert idle
    assert server.comes_to(lambda: server.load.free_pages == server.load.total_pages)
    found = Scrape(server.client.get("/metrics").text)
    usages = [end.usage for end in first_of_each.values()]
    assert found.value("specdec_prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages) == 300
    assert found.value("specdec_cached_tokens_total") == sum(usage.cached_tokens for usage in usages) >= 128
    assert found.value("specdec_generation_tokens_total") == sum(end.usage.output_tokens for end in finished) == 96
    stats = [end.stats for end in finished]
    assert found.value("specdec_draft_tokens_total") == sum(part.num_draft_tokens for part in stats) > 0
    assert found.value("specdec_accepted_tokens_total") == sum(part.num_accepted_draft_tokens for part in stats)
    for drafter, count in found.by_label("specdec_drafter_draft_tokens_total", "drafter").items():
        assert count == sum(part.by_drafter[drafter].num_draft_tokens for part in stats if drafter in part.by_drafter)
    for what in ("proposed", "accepted"):
        at = found.by_label(f"specdec_drafter_{what}_per_position_total", "position")
        mine = [getattr(part.by_drafter["model"], f"{what}_at") for part in stats if "model" in part.by_drafter]
        assert list(at.values()) == [sum(counts) for counts in zip(*mine, strict=True)]
    assert at["1"] > 0
    positions = found.by_label("specdec_accepted_tokens_per_position_total", "position")
    assert sum(positions.values()) == found.value("specdec_accepted_tokens_total")


def test_engine_steps_are_reported(server: Server) -> None:
    before = server.load
    server.run(ask(server, make_request("plain", SpeculationMode.OFF, 1, range(300, 340))))
    server.run(ask(server, make_request("drafts", SpeculationMode.ON, 1, range(300, 340))))
    assert server.comes_to(lambda: server.load.steps > before.steps + 24 and server.load.drafting_steps > 0)
    load = server.load
    found = Scrape(server.client.get("/metrics").text)
    steps = found.by_label("specdec_steps_total", "decision")
    assert steps["draft"] >= load.drafting_steps > 0
    assert steps["plain"] >= 24
    assert found.value("specdec_step_rows_count") == sum(steps.values())
    assert found.value("specdec_step_rows_sum") > found.value("specdec_step_draft_rows_total") > 0
    assert found.value("specdec_step_rows_bucket", le="1.0") < found.value("specdec_step_rows_bucket", le="4096.0")
    assert found.value("specdec_batch_size_bucket", le="256.0") == found.value("specdec_batch_size_count") > 0
    phases = found.by_label("specdec_step_phase_seconds_total", "phase")
    assert set(phases) == {"plan", "draft", "verify", "commit"}
    assert sum(phases.values()) == pytest.approx(found.value("specdec_step_seconds_sum"))
    assert phases["verify"] > 0
    assert found.value("specdec_kv_pages") == load.total_pages == 20
    hit, prompts = load.prefix_hit_tokens, load.prompt_tokens
    assert found.value("specdec_prefix_hit_ratio") == pytest.approx(hit / prompts, rel=0.2)
