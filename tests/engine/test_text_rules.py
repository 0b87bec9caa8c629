"""Text rules and time limits in the engine: cut at the same token with and without speculation, and time is an end."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.types import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.engine.engine import Engine
from tests.engine.tiny_engine import drain, finish_of, run_all, text_of, tiny_engine, tiny_parts, tokens_of

LAYOUT = ("\n", " ", "(", ")", "\n    ", "x", "]")
RULES = st.builds(
    TextRules,
    max_lines=st.none() | st.integers(1, 4),
    min_indent=st.none() | st.integers(1, 3),
    blank_line=st.booleans(),
    closers=st.none() | st.sampled_from(["", ")"]),
    suffix=st.sampled_from(["", ")\n", "\n x(x", " x)"]),
)


def layout_bias() -> tuple[tuple[int, float], ...]:
    """Makes a random model write line breaks, white space and brackets most of the time."""
    tokenizer = tiny_parts().tokenizer
    ids = {i for text in LAYOUT for i in tokenizer.encode(text, add_special=False)}
    return tuple((i, 5.0) for i in sorted(ids))


def request(name: str, mode: SpeculationMode, seed: int, **stopping: Any) -> Request:
    return Request(
        name,
        tuple(tiny_parts().tokenizer.encode("def add(first, second):\n    return first\n" * 3)),
        sampling=SamplingParams(temperature=0.7, seed=seed, logit_bias=layout_bias()),
        stopping=StoppingParams(max_tokens=40, ignore_eos=True, **stopping),
        speculation=SpeculationParams(mode=mode),
    )


@settings(max_examples=25)
@given(rules=RULES, seed=st.integers(0, 2**32))
def test_speculation_cuts_at_the_same_token(rules: TextRules, seed: int) -> None:
    modes = {"off": SpeculationMode.OFF, "on": SpeculationMode.ON}
    events = run_all(tiny_engine(), [request(name, mode, seed, rules=rules) for name, mode in modes.items()])
    off, on = (
        (tokens_of(events, name), text_of(events, name), finish_of(events, name).reason) for name in modes
    )  # fmt: skip
    assert off == on


def test_every_rule_ends_some_text() -> None:
    """The property above is about something: each rule fires on such text."""
    rules = {
        FinishReason.LINES: TextRules(max_lines=2),
        FinishReason.INDENT: TextRules(min_indent=2),
        FinishReason.BLANK_LINE: TextRules(blank_line=True),
        FinishReason.BRACKET: TextRules(closers=""),
        FinishReason.SUFFIX: TextRules(suffix=")\n"),
    }
    for reason, rule in rules.items():
        requests = [request(str(seed), SpeculationMode.ON, seed, rules=rule) for seed in range(8)]
        events = run_all(tiny_engine(), requests)
        ends = [finish_of(events, r.request_id) for r in requests]
        assert reason in {end.reason for end in ends}
        short = next(end for end in ends if end.reason is reason)
        assert short.usage.output_tokens == len(tokens_of(events, short.request_id)) <= 40


def started(name: str, **stopping: Any) -> Engine:
    engine = tiny_engine()
    engine.submit(request(name, SpeculationMode.OFF, 1, **stopping))
    return engine


def step_until(engine: Engine, name: str, tokens: int) -> list[Any]:
    events: list[Any] = []
    while len(tokens_of(events, name)) < tokens:
        assert engine.has_work()
        events += engine.step()
    return events


@pytest.mark.parametrize("limit", ["time_limit_s", "decode_limit_s"])
def test_a_time_limit_ends_with_the_partial_output(limit: str) -> None:
    said = text_of(step_until(started("r"), "r", 3), "r")
    engine = started("r", **{limit: 3600.0}, stop=(f"{said[-1]} and never more",))
    events = step_until(engine, "r", 3)
    assert text_of(events, "r") == said[:-1]  # the rest may begin the stop string
    sequence = engine._requests.live["r"][0]
    assert sequence.first_token_s is not None
    sequence.arrival_s -= 3600
    sequence.first_token_s -= 3600
    events += drain(engine)
    done = finish_of(events, "r")
    assert done.reason is FinishReason.TIME_LIMIT
    assert 3 <= done.usage.output_tokens < 40
    assert text_of(events, "r") == tiny_parts().tokenizer.decode(tokens_of(events, "r"))
    assert engine.load().free_pages == engine.load().total_pages


def test_the_limit_from_the_first_token_does_not_start_again() -> None:
    now = itertools.count(0.0, 0.25)
    engine = tiny_engine(dataclasses.replace(tiny_parts(), clock=lambda: next(now)))
    engine.submit(request("r", SpeculationMode.OFF, 1, decode_limit_s=20.0))
    done = finish_of(drain(engine), "r")
    assert done.reason is FinishReason.TIME_LIMIT
    assert done.timings.decode_ms >= 20_000 > done.timings.prefill_ms


def test_a_time_limit_before_the_first_token() -> None:
    engine = tiny_engine()
    engine.submit(request("late", SpeculationMode.OFF, 1, time_limit_s=0.01, finish_line=True))
    engine.submit(request("patient", SpeculationMode.OFF, 1, decode_limit_s=1e-6))
    time.sleep(0.02)
    events = drain(engine)
    late, patient = finish_of(events, "late"), finish_of(events, "patient")
    assert (late.reason, late.usage.output_tokens) == (FinishReason.TIME_LIMIT, 0)
    assert (patient.reason, patient.usage.output_tokens) == (FinishReason.TIME_LIMIT, 1)


def test_a_started_line_is_finished() -> None:
    free = run_all(tiny_engine(), [request("r", SpeculationMode.ON, 3)])
    engine = tiny_engine()
    engine.submit(request("r", SpeculationMode.ON, 3, time_limit_s=1e-6, finish_line=True))
    engine._requests.live["r"][0].arrival_s += 1e6  # the clock starts when the first tokens are out
    events = step_until(engine, "r", 1)
    engine._requests.live["r"][0].arrival_s -= 1e6
    already = len(text_of(events, "r"))
    events += drain(engine)
    whole = text_of(free, "r")
    assert "\n" in whole[already:]
    assert text_of(events, "r") == whole[: whole.index("\n", already)]
    assert finish_of(events, "r").reason is FinishReason.TIME_LIMIT
