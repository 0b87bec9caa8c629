"""`random:SHAPE` as a model: loads anywhere, the same every time, and an engine runs on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import (
    Delta,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine
from specdec.errors import ModelError
from specdec.models.load import LoadedModel, load_model
from specdec.models.random_model import RANDOM_SHAPES, RandomCheckpoint, RandomSource
from specdec.models.resolve import load_tokenizer
from tests.engine.tiny_engine import finish_of, run_all, text_of, tokens_of

OFF = SpeculationParams(mode=SpeculationMode.OFF)


def arrays(model: LoadedModel) -> dict[str, Tensor]:
    weights = model.weights
    found = {"embed": weights.embed, "final_norm": weights.final_norm, "lm_head": weights.lm_head.data}
    for i, layer in enumerate(weights.layers):
        linears = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate_up, "down": layer.down}
        found |= {f"{i}.{name}": linear.data for name, linear in linears.items()}
        found |= {f"{i}.attn_norm": layer.attn_norm, f"{i}.mlp_norm": layer.mlp_norm}
        assert layer.qkv.bias is not None
        found[f"{i}.bias"] = layer.qkv.bias
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    speculation = SpeculationConfig(drafters=("suffix",), profile_s=0)
    config = EngineConfig(
        target="random:tiny", cache_dir=Path("~/.cache/specdec"), kv_tokens=64 * 40, max_batch=4, max_step_rows=64,
        prefill_chunk=64, max_context=512, threads=1, speculation=speculation,
    )  # fmt: skip
    return Engine(build_parts(config))


def make_request(name: str, prompt: str = "def f(x):", tokens: int = 200, **fields: Any) -> Request:
    return Request(name, tuple(prompt.encode()), stopping=StoppingParams(max_tokens=tokens), **fields)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
def test_two_loads_are_equal_and_write_no_file(dtype: Any, tmp_path: Path) -> None:
    first = load_model("random:tiny", dtype=dtype, cache_dir=tmp_path)
    second = load_model("random:tiny", dtype=dtype, cache_dir=tmp_path)
    assert first.name == "random:tiny"
    ours, theirs = arrays(first), arrays(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert list(tmp_path.rglob("*")) == []


def test_fingerprints_distinguish_shapes() -> None:
    made = [RandomCheckpoint(f"random:{shape}") for shape in RANDOM_SHAPES]
    assert len({checkpoint.fingerprint() for checkpoint in made}) == len(made)


def test_unknown_shapes_list_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"random:llama: no such shape; there are random:llama-3\.1-8b, ") as caught:
        load_model("random:llama", dtype="int8", cache_dir=tmp_path)
    assert all(f"random:{shape}" in str(caught.value) for shape in RANDOM_SHAPES)


def test_a_model_that_does_not_fit_is_rejected_before_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*args: object) -> Tensor:
        raise AssertionError("made before it was known to fit")

    monkeypatch.setattr(RandomSource, "rows", rows)
    monkeypatch.setattr("specdec.models.memory.available_bytes", lambda: 60 << 30)
    with pytest.raises(
        ModelError, match=r"random:qwen2\.5-coder-32b: too little memory: bf16 weights need 6\d\.\d GiB"
    ):
        load_model("random:qwen2.5-coder-32b", dtype="bf16", cache_dir=tmp_path)


def test_the_tokenizer_loads_without_weights(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("random:qwen2.5-coder-7b", tmp_path)
    assert tokenizer.vocab_size == RANDOM_SHAPES["qwen2.5-coder-7b"].vocab_size


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_generates(engine: Engine, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=7)
    requests = [make_request(f"r{i}", f"text {i}", sampling=sampling) for i in range(2)]
    events = run_all(engine, [*requests, make_request("off", "text 0", sampling=sampling, speculation=OFF)])
    first, second, off = (tokens_of(events, name) for name in ("r0", "r1", "off"))
    assert first == off
    assert first != second
    assert len(first) == len(second) == 200
    assert len(set(first)) > 40
    assert finish_of(events, "r0").reason == "length"
    assert " 1" in text_of(events, "r0")


def test_logits_are_neither_flat_nor_certain(engine: Engine) -> None:
    events = run_all(
        engine, [make_request("r", sampling=SamplingParams(temperature=0.0), output=OutputParams(logprobs=2))]
    )
    found = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs or ()]
    assert len(found) == 200
    best = sorted(entry.logprob for entry in found)
    assert -4.0 < best[len(best) // 2] < -0.1
    assert best[0] > -6.0


def test_a_grammar_can_end_an_answer(engine: Engine) -> None:
    grammar = GrammarParams(GrammarKind.CHOICE, '["yes", "no"]')
    events = run_all(engine, [make_request("g", sampling=SamplingParams(seed=1), grammar=grammar)])
    assert text_of(events, "g") in ("yes", "no")
    assert finish_of(events, "g").reason == "eos"
