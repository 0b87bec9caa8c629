"""Embeddings: against transformers, and bit for bit whatever else the engine does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel

from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import (
    Failed,
    Finished,
    FinishReason,
    Pooling,
    Request,
    RequestEvent,
    SamplingParams,
    StoppingParams,
)
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from tests.engine.late_verifier import LateVerifier
from tests.engine.tiny_engine import drain, run_all, tiny_engine, tiny_parts, tokens_of
from tests.models.embedders import make_embedder

PROMPT = tuple(torch.randint(3, 380, (150,), generator=torch.Generator().manual_seed(8)).tolist())
POOLINGS = list(Pooling)


def embed(request_id: str, prompt: tuple[int, ...], pooling: Pooling, **fields: Any) -> Request:
    """A request for an embedding."""
    return Request(request_id, prompt, stopping=StoppingParams(max_tokens=0), pooling=pooling, **fields)


def generate(request_id: str, prompt: tuple[int, ...], tokens: int = 20, **fields: Any) -> Request:
    """A request that drafts and samples."""
    sampling, stopping = SamplingParams(seed=5), StoppingParams(max_tokens=tokens, ignore_eos=True)
    return Request(request_id, prompt, sampling, stopping, **fields)


def ends(events: list[RequestEvent]) -> dict[str, Finished]:
    """By request id, how each request ended."""
    return {event.request_id: event for event in events if isinstance(event, Finished)}


def solo(parts: EngineParts, prompt: tuple[int, ...], pooling: Pooling) -> bytes:
    """The embedding from an engine that does nothing else."""
    return ends(run_all(tiny_engine(parts), [embed("solo", prompt, pooling)]))["solo"].embedding


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma3"])
@pytest.mark.parametrize("length", [1, 64, 150])
def test_cosine_to_transformers(family: str, length: int) -> None:
    parts, prompt = tiny_parts(family, dtype="fp32", kv_dtype="fp32"), PROMPT[:length]
    oracle = AutoModel.from_pretrained(parts.config.target, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = oracle(torch.tensor([prompt])).last_hidden_state[0].double()
    for pooling, expected in ((Pooling.LAST, states[-1]), (Pooling.MEAN, states.mean(0))):
        got = torch.from_numpy(np.frombuffer(solo(parts, prompt, pooling), "<f4").copy()).double()
        assert got @ expected / expected.norm() >= 0.9999
        assert got.norm().item() == pytest.approx(1.0, abs=1e-6)


prompts = st.lists(st.integers(0, 379), min_size=1, max_size=200).map(tuple)
embeddings = st.tuples(prompts, st.sampled_from(POOLINGS), st.integers(0, 2))


@settings(max_examples=25)
@given(
    drawn=st.lists(embeddings, min_size=1, max_size=5),
    chunk=st.sampled_from([5, 33, 64]),
    pages=st.sampled_from([None, 8]),
    cache=st.booleans(),
)
def test_bits_depend_on_the_prompt_only(
    drawn: list[tuple[tuple[int, ...], Pooling, int]], chunk: int, pages: int | None, cache: bool
) -> None:
    """Beside a stream that drafts, in any chunks, with too few pages, and again from a warm cache."""
    parts = tiny_parts()
    alone = [solo(parts, prompt, pooling) for prompt, pooling, _ in drawn]
    stream = generate("stream", PROMPT[:20] * 3)
    tokens = tokens_of(run_all(tiny_engine(parts), [stream]), "stream")
    engine = tiny_engine(parts, pages, prefill_chunk=chunk, prefix_cache=cache)
    for _ in range(2):
        asked = [
            embed(f"e{i}", prompt, pooling, priority=priority) for i, (prompt, pooling, priority) in enumerate(drawn)
        ]
        events = run_all(engine, [stream, *asked])
        assert tokens_of(events, "stream") == tokens
        assert [ends(events)[f"e{i}"].embedding for i in range(len(drawn))] == alone


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_cached_prompt_gives_the_same_bits(pooling: Pooling) -> None:
    engine, parts = tiny_engine(), tiny_parts()
    run_all(engine, [generate("a", PROMPT)])
    again = ends(run_all(engine, [embed("b", PROMPT, pooling)]))["b"]
    assert again.embedding == solo(parts, PROMPT, pooling)
    # The mean needs every token's state, which the cache does not hold.
    assert again.usage.cached_tokens == (len(PROMPT) - 1 if pooling is Pooling.LAST else 0)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_that_is_set_aside_gives_the_same_bits(pooling: Pooling, cache: bool) -> None:
    engine = tiny_engine(prefill_chunk=16, prefix_cache=cache)
    engine.submit(embed("a", PROMPT, pooling))
    for _ in range(3):
        engine.step()
    engine._scheduler.preempt(engine._scheduler.running[0])
    end = ends(drain(engine))["a"]
    assert (end.embedding, end.usage.preemptions) == (solo(tiny_parts(), PROMPT, pooling), 1)


def test_an_embedding_leaves_its_pages_to_later_requests() -> None:
    engine = tiny_engine()
    run_all(engine, [embed("a", PROMPT, Pooling.MEAN)])
    assert ends(run_all(engine, [generate("b", PROMPT)]))["b"].usage.cached_tokens == len(PROMPT) - 1


def test_a_late_verifier_gives_the_same_bits() -> None:
    parts, log = tiny_parts(), list[str]()
    engine = Engine(dataclasses.replace(parts, kv=tiny_engine()._kv, verifier=LateVerifier(parts, log)))
    events = run_all(engine, [generate("stream", PROMPT[:40]), *(embed(p.value, PROMPT, p) for p in POOLINGS)])
    assert {p: ends(events)[p.value].embedding for p in POOLINGS} == {p: solo(parts, PROMPT, p) for p in POOLINGS}
    assert log.count("wait") > 3


def test_it_samples_and_drafts_nothing() -> None:
    engine = tiny_engine()
    end = ends(run_all(engine, [embed("a", PROMPT, Pooling.LAST)]))["a"]
    assert (end.reason, end.usage.prompt_tokens, end.usage.output_tokens) == (FinishReason.LENGTH, len(PROMPT), 0)
    assert (engine.load().draft_rows, engine.load().step_rows) == (0, len(PROMPT))


@pytest.mark.parametrize("ending", [FinishReason.ABORTED, FinishReason.DEADLINE])
def test_an_embedding_that_is_cut_off_frees_its_pages(ending: FinishReason) -> None:
    now = [0.0]
    parts = dataclasses.replace(tiny_parts(), clock=lambda: now[0])
    engine = tiny_engine(parts, prefill_chunk=16)
    engine.submit(embed("a", PROMPT, Pooling.MEAN, deadline_s=1.0))
    events = engine.step()
    if ending is FinishReason.ABORTED:
        engine.abort("a")
    now[0] = 2.0
    end = ends(events + drain(engine))["a"]
    assert (end.reason, end.embedding) == (ending, b"")
    assert engine.load().free_pages == engine.load().total_pages


def test_a_broken_model_fails_only_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    states = engine._verifier.final_states
    monkeypatch.setattr(engine._verifier, "final_states", lambda i, rows: states(i, rows) * np.nan)
    events = run_all(engine, [embed("a", PROMPT, Pooling.LAST), generate("b", PROMPT)])
    assert [(e.request_id, e.reason) for e in events if isinstance(e, Failed)] == [("a", "MODEL_BROKEN")]
    assert len(tokens_of(events, "b")) == 20


def test_an_embedding_model_loads_no_draft(tmp_path: Path) -> None:
    """The models of a server may share ``draft`` and ``indexes``."""
    folder = str(make_embedder(tmp_path / "m"))
    config = EngineConfig(
        target=folder, draft=folder, device="cpu", kernels="native", kv_tokens=64 * 9, indexes={"a": tmp_path / "none"},
        cache_dir=Path("~/.cache/specdec"), speculation=SpeculationConfig(profile_s=0.01),
    )  # fmt: skip
    info = build_parts(config).info
    assert (info.pooling, info.draft, info.drafters) == (Pooling.LAST, None, ())
