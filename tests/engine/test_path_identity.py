"""The promise itself, as a property: tokens and log-probabilities do not depend on batch conditions."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.path_identity import PLAIN, BatchConditions, Outcomes, first_mismatches, run_conditions
from specdec.config import KvDtype
from specdec.core.types import OutputParams, Request, SamplingParams, StoppingParams
from specdec.engine.engine import EngineParts
from tests.engine.tiny_engine import tiny_parts

words = st.lists(st.integers(0, 379), min_size=1, max_size=6)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Repetitive prompts, so that the suffix drafter makes proposals."""
    parts = draw(st.lists(words, min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(parts) - 1), min_size=1, max_size=25))
    return tuple(t for i in order for t in parts[i])


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([(), ((5, 3.0), (9, -50.0))]),
    allowed_token_ids=st.sampled_from([(), tuple(range(40))]),
    seed=st.integers(0, 2**64 - 1),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)
stoppings = st.builds(
    StoppingParams,
    max_tokens=st.integers(1, 40),
    min_tokens=st.just(0),
    stop=st.sampled_from([(), ("a",), ("th", "xyz")]),
    stop_token_ids=st.sampled_from([(), (3, 77)]),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    Request,
    request_id=st.just(""),
    prompt_ids=prompts(),
    sampling=samplings,
    stopping=stoppings,
    output=st.builds(OutputParams, logprobs=st.sampled_from([None, 0, 4])),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from(["", "x"]),
)
all_conditions = st.builds(
    BatchConditions,
    name=st.just("drawn"),
    drafters=st.sampled_from([(), ("suffix",), ("model",), ("suffix", "model")]),
    max_nodes=st.integers(1, 20),
    max_depth=st.integers(1, 8),
    width=st.integers(1, 5),
    concurrency=st.integers(1, 8),
    prefill_chunk=st.sampled_from([6, 33, 64]),
    kv_pages=st.sampled_from([None, 9, 12]),
    preempt_every=st.sampled_from([0, 0, 5, 11]),
    warm=st.booleans(),
)


def named(drawn: list[Request]) -> list[Request]:
    from dataclasses import replace

    return [replace(r, request_id=f"r{i}") for i, r in enumerate(drawn)]


def check(parts: EngineParts, drawn: list[Request], conditions: BatchConditions) -> Outcomes:
    plain = run_conditions(parts, PLAIN, named(drawn))
    other = run_conditions(parts, conditions, named(drawn))
    mismatches = first_mismatches(conditions.name, plain, other)
    assert not mismatches, mismatches[0]
    return other


@settings(max_examples=40)
@given(drawn=st.lists(requests, min_size=1, max_size=6), conditions=all_conditions)
def test_batch_conditions_change_no_token(drawn: list[Request], conditions: BatchConditions) -> None:
    check(tiny_parts(), drawn, conditions)


@pytest.mark.parametrize(
    "family",
    [
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma",
        "gemma3",
        "granite",
        "granitemoe",
        "mixtral",
        "smollm3",
        "seed_oss",
        "ministral3",
        "phi3",
        "llama3",
    ],
)
@settings(max_examples=8)
@given(drawn=st.lists(requests, min_size=2, max_size=4), conditions=all_conditions)
def test_every_family(family: str, drawn: list[Request], conditions: BatchConditions) -> None:
    check(tiny_parts(family), drawn, conditions)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp32", "fp32"), ("bf16", "int8")])  # the others: int8 and bf16
@settings(max_examples=8)
@given(drawn=st.lists(requests, min_size=2, max_size=4), conditions=all_conditions)
def test_every_dtype(dtype: str, kv_dtype: KvDtype, drawn: list[Request], conditions: BatchConditions) -> None:
    check(tiny_parts(dtype=dtype, kv_dtype=kv_dtype), drawn, conditions)


@functools.cache
def _drafted(kv_dtype: KvDtype) -> Outcomes:
    """A fixed mix that must draft, preempt and share, or the properties above would be about nothing."""
    drawn = [
        Request(
            "",
            tuple([7 + i, 8, 9, 10, 11] * 20),
            SamplingParams(temperature=t, seed=i),
            StoppingParams(max_tokens=100, ignore_eos=True),
        )
        for i, t in enumerate([0.0, 0.0, 0.2, 0.2, 1.0, 1.0])
    ]
    return check(
        tiny_parts(kv_dtype=kv_dtype), drawn, BatchConditions("mix", ("suffix", "model"), 12, 5, 3, 6, 64, kv_pages=9)
    )


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_the_mix_accepts_drafts(kv_dtype: KvDtype) -> None:
    assert sum(o.accepted for o in _drafted(kv_dtype).values()) > 20


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_the_mix_preempts(kv_dtype: KvDtype) -> None:
    assert sum(o.preemptions for o in _drafted(kv_dtype).values()) > 0
