"""Random EAGLE-3 checkpoints, written as their publishers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 48, 80, 4, 2, 16
EPS, THETA = 1e-5, 10000.0


def head_config(vocab: int, draft_vocab: int, **changes: Any) -> dict[str, Any]:
    """A config.json; ``changes`` with the value None remove a field."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def head_tensors(
    target_hidden: int, vocab: int, draft_vocab: int, *, hidden: int = HIDDEN, seed: int = 0
) -> dict[str, Tensor]:
    """Random tensors in EAGLE's own names; with a reduced vocabulary also ``d2t`` and ``t2d``."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(hidden, generator=generator)

    layer, q, kv = "midlayer.", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    tensors = {
        "fc.weight": matrix(hidden, 3 * target_hidden),
        layer + "self_attn.q_proj.weight": matrix(q, 2 * hidden),
        layer + "self_attn.k_proj.weight": matrix(kv, 2 * hidden),
        layer + "self_attn.v_proj.weight": matrix(kv, 2 * hidden),
        layer + "self_attn.o_proj.weight": matrix(hidden, q),
        layer + "mlp.gate_proj.weight": matrix(FFN, hidden),
        layer + "mlp.up_proj.weight": matrix(FFN, hidden),
        layer + "mlp.down_proj.weight": matrix(hidden, FFN),
        layer + "input_layernorm.weight": norm(),
        layer + "hidden_norm.weight": norm(),
        layer + "post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(draft_vocab, hidden) * 3,
        "embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
    }
    if draft_vocab != vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], form: str = "safetensors") -> Path:
    """Write a checkpoint: ``form`` "safetensors", "sharded" or "bin"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "sharded":
        names = sorted(tensors)
        shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, folder / file)
        index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
