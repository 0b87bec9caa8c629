"""Any number of ranks gives the logits of one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from tests.kernels.natives import native_backend
from tests.models.tensor_parallel.teams import SIZES, ThreadTeam
from tests.models.tiny import VOCAB_SIZE, make_tiny_model
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

# Uneven heads, more ranks than KV heads, grouped queries, biases, tied and untied tables, norms of q and k and behind
# blocks, windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nine heads over three": (
        "llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288, "head_dim": 32, "intermediate_size": 160}
    ),
    "biases, untied": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 160, "head_dim": 32,
                                   "intermediate_size": 128}),
    "query norms": ("qwen3", {"hidden_size": 128, "intermediate_size": 288}),
    "gelu, norms behind, windows": ("gemma3", {"hidden_size": 160, "intermediate_size": 160}),
    "heads of half a tile": ("mistral", {"hidden_size": 128, "num_key_value_heads": 4, "intermediate_size": 128}),
}  # fmt: skip
TREE = [-1, 0, 0, 1, 2, 2, 5]


def logits(decoder: Decoder | ThreadTeam) -> torch.Tensor:
    """Of a prompt in two chunks beside another, then of a tree over it."""
    tokens = torch.randint(0, VOCAB_SIZE, (110,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for low, high in ((0, 60), (60, 100)):
        entries = [BatchEntry(tokens[low:high], list(range(-1, high - low - 1)), low, [5, 2])]
        if low:
            entries.append(BatchEntry(tokens[:7], list(range(-1, 6)), 0, [1]))
        batch = ForwardBatch.build(entries)
        found.append(decoder.forward(batch, range(0, batch.rows, 3)).clone())
    batch = ForwardBatch.build([BatchEntry(tokens[100:107], TREE, 100, [5, 2])])
    found.append(decoder.forward(batch, range(7)).clone())
    decoder.forward(batch, [])  # without logits
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("int8", torch.bfloat16), ("bf16", torch.int8), ("fp32", torch.float32)], ids=str
)
def test_logits_do_not_depend_on_the_ranks(name: str, dtype: Any, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    family, shape = MODELS[name]
    folder = make_tiny_model(family, tmp_path / "model", **shape)
    model = load_model(str(folder), dtype=dtype, cache_dir=tmp_path)
    whole = Decoder(
        model.config, model.weights, native_backend(), KvPool(model.config, SIZES.pages, kv_dtype),
        max_rows=SIZES.max_rows, max_logit_rows=SIZES.max_logit_rows, max_positions=SIZES.max_positions,
        aux_layers=(1, 0),
    )  # fmt: skip
    expected = logits(whole)
    for size in (1, 2, 4):
        team = ThreadTeam(folder, tmp_path, size, dtype, kv_dtype, aux_layers=(1, 0))
        assert torch.equal(logits(team), expected)
        assert torch.equal(team.decoders[0].aux_hidden_states[:7], whole.aux_hidden_states[:7])
