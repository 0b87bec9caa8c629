"""Any number of ranks gives the logits of one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from specdec.models.tensor_parallel.shard_decoder import ShardDecoder, shared_shapes
from specdec.models.tensor_parallel.shares import share_out
from tests.kernels.natives import CACHE, native_backend
from tests.models.tensor_parallel.teams import SIZES, ThreadTeam
from tests.models.tiny import VOCAB_SIZE, make_tiny_model
from tests.models.tiny_gguf import write_tiny_gguf
from verify_kernels.backend import AddRowsSpec, GateSpec
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.shared_ranks import SharedRanks, create_segment, segment_bytes
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.reference.backend import ReferenceBackend

# Uneven heads, more ranks than KV heads, grouped queries, biases, tied and untied tables, norms of q and k and behind
# blocks, windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nine heads over three": (
        "llama",
        {
            "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 288, "head_dim": 32,
            "intermediate_size": 160,
        },
    ),
    "biases, untied": (
        "qwen2", {"num_key_value_heads": 4, "hidden_size": 160, "head_dim": 32, "intermediate_size": 128}
    ),
    "query norms": ("qwen3", {"hidden_size": 128, "intermediate_size": 288}),
    "gelu, norms behind, windows": ("gemma3", {"hidden_size": 160, "intermediate_size": 160}),
    "heads of half a tile": ("mistral", {"hidden_size": 128, "num_key_value_heads": 4, "intermediate_size": 128}),
}  # fmt: skip
TREE = [-1, 0, 0, 1, 2, 2, 5]
AUX = (1, 0)


def whole_decoder(folder: Path, cache: Path, dtype: Any, kv_dtype: torch.dtype) -> Decoder:
    model = load_model(str(folder), dtype=dtype, cache_dir=cache)
    return Decoder(
        model.config, model.weights, native_backend(), KvPool(model.config, SIZES.pages, kv_dtype),
        max_rows=SIZES.max_rows, max_logit_rows=SIZES.max_logit_rows, max_positions=SIZES.max_positions,
        aux_layers=AUX,
    )  # fmt: skip


def logits(decoder: Decoder | ThreadTeam) -> torch.Tensor:
    """Return the logits of a prompt in two chunks, the second batched with another prompt, then of a tree after it."""
    tokens = torch.randint(0, VOCAB_SIZE, (110,), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for low, high in ((0, 60), (60, 100)):
        entries = [BatchEntry(tokens[low:high], list(range(-1, high - low - 1)), low, [5, 2])]
        if low:
            entries.append(BatchEntry(tokens[:7], list(range(-1, 6)), 0, [1]))
        batch = ForwardBatch.build(entries)
        found.append(decoder.forward(batch, range(0, batch.rows, 3)).clone())
    batch = ForwardBatch.build([BatchEntry(tokens[100:107], TREE, 100, [5, 2])])
    decoder.forward(batch, [])  # without logits
    found.append(decoder.forward(batch, range(7)).clone())
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("int8", torch.bfloat16), ("bf16", torch.int8), ("fp32", torch.float32)], ids=str
)
def test_logits_do_not_depend_on_the_ranks(name: str, dtype: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    family, shape = MODELS[name]
    folder = make_tiny_model(family, tmp_path / "model", **shape)
    whole = whole_decoder(folder, tmp_path, dtype, kv_dtype)
    expected = logits(whole)
    for size in (1, 2, 4):
        team = ThreadTeam(folder, tmp_path, size, dtype, kv_dtype, aux_layers=AUX)
        assert torch.equal(logits(team), expected)
        assert torch.equal(team.decoders[0].aux_hidden_states[:7], whole.aux_hidden_states[:7])


@pytest.mark.parametrize("tied", [True, False])
def test_a_files_own_blocks_are_sharded_unchanged(tied: bool, tmp_path: Path) -> None:
    """Layers of two kinds, and an output table that is the embedding too, which the first rank looks rows up in."""
    folder = make_tiny_model(
        "qwen3", tmp_path / "model", hidden_size=128, tie_word_embeddings=tied, intermediate_size=128
    )
    file = tmp_path / "model.gguf"
    write_tiny_gguf(folder, file, Kind.Q8_0, others={"attn_v": Kind.Q5_0, "ffn_up": Kind.Q4_1})
    expected = logits(whole_decoder(file, tmp_path, "auto", torch.bfloat16))
    for size in (2, 4):
        assert torch.equal(logits(ThreadTeam(file, tmp_path, size, "auto", torch.bfloat16)), expected)


def test_a_single_rank_waits_for_no_other(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model", head_dim=32, hidden_size=64)
    whole = whole_decoder(folder, tmp_path, "int8", torch.bfloat16)
    (share,) = share_out(whole.config, 1)
    shapes = shared_shapes(whole.config, SIZES)
    ranks = SharedRanks(load_library(CACHE), create_segment(segment_bytes(shapes)), shapes, rank=0, size=1, spin_us=0)
    pool = KvPool(whole.config, SIZES.pages, torch.bfloat16)
    alone = ShardDecoder(share, whole.weights, native_backend(), pool, ranks, SIZES)
    batch = ForwardBatch.build([BatchEntry([3, 5, 7], [-1, 0, 0], 0, [1])])
    alone.embed(batch)
    assert torch.equal(alone.forward(batch, [0, 1, 2]), whole.forward(batch, [0, 1, 2]))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_fused_kernels_equal_their_plain_equivalents(activation: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    src, norm = torch.randn(3, 54, generator=generator), torch.randn(27, generator=generator)
    for post_norm in (None, norm):
        found = []
        for backend in (native_backend(), ReferenceBackend(1)):
            wide, added = torch.zeros(3, 40), torch.ones(3, 27)
            backend.gate(GateSpec(src, wide[:, 5:32], activation))(3)
            assert not wide[:, :5].any()
            assert not wide[:, 32:].any()
            backend.add_rows(AddRowsSpec(wide[:, 5:32], added, post_norm, 1e-5))(2)
            assert torch.equal(added[2], torch.ones(27))
            found.append(torch.cat((wide[:, 5:32], added)))
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
