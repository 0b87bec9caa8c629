"""The benchmark of a long prompt: gaps by hand, and a whole run with the paced engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

from bench.frontend.frontend_bench import FACTORY, TOKENIZER
from bench.frontend.paced_engine import paced_target
from bench.long_prompt import LongPromptPlan, StreamLog, _behind_long, _one_round, measure_long_prompt
from specdec.client.client import Client
from specdec.config import Config, EngineConfig
from specdec.core.types import Delta


def test_gaps_count_where_some_of_them_lies_between_the_times() -> None:
    log = StreamLog([0.0, 1.0, 1.5, 4.0, 4.25])
    assert log.gaps_ms(1.2, 3.0) == [500, 2500]
    assert log.gaps_ms(1.0, 1.5) == [500]
    assert log.gaps_ms(5.0, 6.0) == []


class FakeClient:
    """Streams return a part before the prompt's answer and one after it; answers take no time."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.prompts: list[list[int]] = []

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Delta]:
        yield Delta("r", 0, [1], "a")
        await self.answered.wait()
        await asyncio.sleep(0.02)
        yield Delta("r", 0, [1], "a")
        await asyncio.Event().wait()

    async def generate(self, prompt: Sequence[int], **_: Any) -> None:
        self.prompts.append(list(prompt))
        self.answered.set()


async def test_bug_the_gap_that_spans_the_end_of_the_prompt_counts() -> None:
    client, plan = cast(Client, FakeClient()), LongPromptPlan(streams=2, tokens=200, before_s=0.01)
    begin_s, end_s, logs = await _one_round(client, range(500), plan, 0)
    assert [len(log.gaps_ms(begin_s, end_s)) for log in logs] == [1, 1]


async def test_bug_a_long_prompt_of_less_than_a_chunk_is_one_chunk() -> None:
    client = FakeClient()
    await _behind_long(cast(Client, client), range(500), LongPromptPlan(long_tokens=100), lambda _: None, 192)
    assert client.prompts[-1] == list(range(192))


async def test_a_whole_run() -> None:
    config = Config(engine=EngineConfig(target=paced_target(2.0)))
    plan = LongPromptPlan(streams=2, tokens=200, rounds=1, before_s=0.3, long_tokens=400)
    notes: list[str] = []
    found = await measure_long_prompt(config, plan, notes.append, factory=FACTORY, tokenizer=TOKENIZER)
    assert found["gaps_before_ms"]["n"] > 0
    assert found["gaps_during_ms"]["n"] > 0
    assert found["read_alone_s"]["n"] == found["read_beside_s"]["n"] == 1
    assert found["short_alone_s"]["p50"] > 0.004
    assert found["short_behind_s"]["n"] >= 1
    assert len(notes) == 2
