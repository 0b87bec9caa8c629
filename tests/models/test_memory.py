"""The planned memory of a model, against what its decoder allocates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.models.memory import measure_model
from tests.kernels.natives import native_backend
from tests.models.test_decoder_oracle import make_decoder
from tests.models.tiny import make_tiny_model

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"intermediate_size": 1536}),
    ("qwen3_moe", {"moe_intermediate_size": 256}),
]


@pytest.mark.parametrize(("family", "sizes"), FAMILIES)
def test_sizes_are_those_of_the_decoder(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Of a mixture of experts a row reads those that it chooses, and has a place in the buffers for each of them."""
    folder = make_tiny_model(family, tmp_path / "m", hidden_size=512, **sizes)
    decoder = make_decoder(folder, tmp_path / "cache", native_backend(), "int8")
    size = measure_model(str(folder), dtype="int8", cache_dir=tmp_path / "cache")
    tensors = [each for owner in (decoder, decoder.backend) for each in vars(owner).values()]
    taken = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
    assert size.step_bytes(decoder.max_rows) == pytest.approx(taken, rel=0.03)
    assert size.read_bytes == pytest.approx(decoder.weights.nbytes, rel=0.02)
    experts = decoder.config.experts / decoder.config.experts_per_token if decoder.config.experts else 1
    mlps = sum(layer.gate_up.nbytes + layer.down.nbytes for layer in decoder.weights.layers)
    parts = (each for layer in decoder.weights.layers for each in (layer.qkv, layer.o, layer.router))
    others = sum(each.nbytes for each in parts if each is not None)
    assert decoder.weights.nbytes == pytest.approx(decoder.weights.lm_head.nbytes + others + mlps / experts, rel=1e-3)
