"""Random weights: their distribution, and that they are the same however they are read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import ModelError
from specdec.models.pack import check_shapes
from specdec.models.random_model import LOGIT_STD, RANDOM_SHAPES, RandomSource, control_token_ids

TINY = RANDOM_SHAPES["tiny"]
# Of the published checkpoints, by their model cards' safetensors metadata
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-coder-1.5b": 1_543_714_304,
    "qwen2.5-coder-7b": 7_615_616_512,
    "qwen2.5-coder-32b": 32_763_876_352,
}


def source(shape: str = "tiny", seed: int = 0, **changes: object) -> RandomSource:
    return RandomSource(shape, replace(RANDOM_SHAPES[shape], **changes), seed)  # type: ignore[arg-type]


def roles_of(made: RandomSource) -> list[str]:
    parts = ["attn_norm", "q", "k", "v", "o", "q_norm", "k_norm", "mlp_norm", "gate", "up", "down"]
    names = [
        f"layers.{i}.{part}{kind}" for i in range(made.config.n_layers) for part in parts for kind in ("", ".bias")
    ]
    return [role for role in ["embed", "lm_head", "final_norm", *names] if made.has(role)]


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_equal_the_models(shape: str) -> None:
    made = source(shape)
    check_shapes(made)
    assert sum(math.prod(made.shape(role)) for role in roles_of(made)) == PARAMETERS[shape]


@given(st.sampled_from(["embed", "lm_head", "layers.0.q", "layers.1.down"]), st.data())
@settings(max_examples=60)
def test_rows_do_not_depend_on_how_they_are_sliced(role: str, data: st.DataObject) -> None:
    made = source(hidden_size=60, intermediate_size=90)  # rows that end within a word of the generator
    n_rows = made.shape(role)[0]
    whole = made.rows(role, 0, n_rows)
    low = data.draw(st.integers(0, n_rows))
    high = data.draw(st.integers(low, n_rows))
    assert torch.equal(made.rows(role, low, high), whole[low:high])
    assert torch.equal(source(hidden_size=60, intermediate_size=90).rows(role, low, high), whole[low:high])


def test_tensors_seeds_and_rows_are_independent() -> None:
    made, other = source(), source(seed=1)
    first_rows = [made.rows(role, 0, 1)[0, :32] for role in roles_of(made) if len(made.shape(role)) == 2]
    first_rows += [made.rows("embed", i, i + 1)[0, :32] for i in range(1, 20)]
    signs = torch.stack(first_rows).sign()
    agreement = (signs @ signs.T / 32 - torch.eye(len(signs))).abs()
    assert agreement.max() < 0.9
    assert not torch.equal(made.rows("embed", 0, 8), other.rows("embed", 0, 8))
    assert not torch.equal(made.vector("final_norm"), other.vector("final_norm"))


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen2.5-coder-1.5b"])
def test_standard_deviations(shape: str) -> None:
    made = source(shape)
    hidden = made.config.hidden_size
    tied = made.config.tie_embeddings
    embed = made.rows("embed", 1000, 1100)
    assert float(embed.std()) == pytest.approx(LOGIT_STD / math.sqrt(hidden) if tied else 1.0, rel=0.02)
    head = embed if tied else made.rows("lm_head", 1000, 1100)
    hidden_state = torch.randn(hidden, generator=torch.Generator().manual_seed(1))
    assert float((head @ hidden_state).std()) == pytest.approx(LOGIT_STD, rel=0.2)
    assert float(made.rows("layers.3.gate", 0, 64).std()) == pytest.approx(hidden**-0.5, rel=0.02)
    assert abs(float(made.rows("layers.3.up", 0, 64).mean())) < 0.02 * hidden**-0.5
    assert float(made.vector("layers.3.attn_norm").mean()) == pytest.approx(1.0, abs=0.02)
    assert abs(float(made.vector("final_norm").mean())) < 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_control_tokens_are_unlikely(tied: bool) -> None:
    made = source(tie_embeddings=tied)
    assert made.has("lm_head") is not tied
    head = made.rows("embed" if tied else "lm_head", 0, TINY.vocab_size)
    control = list(control_token_ids(TINY.vocab_size))
    assert float(head[control].norm(dim=1).max()) < float(head[: control[0]].norm(dim=1).min()) / 4


def test_biases_and_qk_norms_follow_the_configuration() -> None:
    plain, full = source(qkv_bias=False), source(qk_norm=True)
    assert not plain.has("layers.0.q.bias")
    assert not plain.has("layers.0.q_norm")
    assert full.shape("layers.0.k.bias") == (TINY.kv_size,)
    assert full.shape("layers.1.q_norm") == (TINY.head_dim,)
    assert not full.has("layers.0.o.bias")
    with pytest.raises(ModelError, match=r"tiny: a model of this shape has no tensor layers\.0\.q_norm"):
        plain.vector("layers.0.q_norm")
