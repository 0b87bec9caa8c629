"""A long prompt in company: gaps by hand, and a whole run against an engine that takes no time."""

from __future__ import annotations

from bench.frontend.frontend_bench import FACTORY, TOKENIZER
from bench.frontend.paced_engine import paced_target
from bench.long_prompt import LongPromptPlan, StreamLog, measure_long_prompt
from specdec.config import Config, EngineConfig


def test_gaps_count_where_some_of_them_lies_between_the_times() -> None:
    log = StreamLog([0.0, 1.0, 1.5, 4.0, 4.25])
    assert log.gaps_ms(1.2, 3.0) == [500, 2500]
    assert log.gaps_ms(1.0, 1.5) == [500]
    assert log.gaps_ms(5.0, 6.0) == []


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
