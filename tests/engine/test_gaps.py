"""The first grammar and the first token healing after a start, with eight running streams of SmolLM2-135M."""

from __future__ import annotations

import time

import pytest

from specdec.config import EngineConfig
from specdec.core.types import (
    Delta,
    GrammarKind,
    GrammarParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.build import build_served_engine
from specdec.engine.engine import Engine

GAP_MS = 100.0  # most time between two tokens of a stream
PLAIN = SpeculationParams(SpeculationMode.OFF)


def worst_gap_ms(engine: Engine, name: str, late: Request) -> float:
    """The longest time between two tokens of eight streams, when ``late`` comes in the middle."""
    stop, last, worst = StoppingParams(max_tokens=120, ignore_eos=True), dict[str, float](), 0.0
    for i in range(8):
        prompt = tuple(range(100 + i, 140 + i))
        engine.submit(Request(f"{name}{i}", prompt, SamplingParams(seed=i), stop, speculation=PLAIN))
    steps = 0
    while engine.has_work():
        steps += 1
        if steps == 30:
            engine.submit(late)
        for event in engine.step():
            now = time.perf_counter()
            if isinstance(event, Delta) and event.request_id.startswith(name):
                worst = max(worst, now - last.get(event.request_id, now))
                last[event.request_id] = now
    return worst * 1e3


@pytest.mark.slow
def test_the_first_grammar_and_the_first_healing_delay_no_stream() -> None:
    engine = build_served_engine(EngineConfig(target="smollm2-135m", kv_tokens=16384, max_batch=16))
    stop, prompt = StoppingParams(max_tokens=20), tuple(range(50, 80))
    healing = Request("healing", prompt, SamplingParams(seed=1), stop, healing_prefix="ret")
    grammar = Request("grammar", prompt, SamplingParams(seed=1), stop, grammar=GrammarParams(GrammarKind.JSON_OBJECT))
    assert worst_gap_ms(engine, "h", healing) <= GAP_MS
    assert worst_gap_ms(engine, "g", grammar) <= GAP_MS
    engine.close()
