"""A new head for a target, and a trained one's folder: safetensors, config.json and its card."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

import specdec
from specdec.atomic_file import replacing
from specdec.engine.build import host_embedding
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.decoder import Decoder
from specdec.training.head_module import HeadModule
from specdec.training.texts import writing
from verify_kernels.packed_weights import PackedLinear, StackedLinear, unpack_linear

COVERED = 0.99  # of the answers' tokens, by the draft vocabulary
_ROUND = 64  # the draft vocabulary has a multiple of so many tokens
_SPREAD = 0.5  # standard deviation of a new matrix's products, for inputs of variance 1


class TargetTables(NamedTuple):
    """What a head shares with its target or begins with, float32 or float16."""

    embed: Tensor  # [vocab, hidden]
    output: Tensor  # [vocab, hidden]
    final_norm: Tensor  # [hidden]

    @staticmethod
    def of(decoder: Any) -> TargetTables:
        """From the target's decoder, on a CPU or a GPU. An output table in a GPU's formats of 4 or 8 bits is not read:
        the embedding stands in."""
        weights = decoder.weights if isinstance(decoder, Decoder) else decoder.model.weights
        embed, table = host_embedding(weights), weights.lm_head
        if isinstance(table, PackedLinear | StackedLinear):
            return TargetTables(embed, unpack_linear(table), weights.final_norm.float())
        output = getattr(table, "weight", None)
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.itemsize == 1:
            output = embed
        return TargetTables(embed, output.cpu(), weights.final_norm.float().cpu())


def draft_vocabulary(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The fewest tokens that cover `COVERED` of ``counts`` [vocab], rounded up to a multiple of `_ROUND`; rising."""
    best = np.argsort(-counts, kind="stable")
    least = int(np.searchsorted(np.cumsum(counts[best]), COVERED * counts.sum())) + 1
    return np.sort(best[: -(-least // _ROUND) * _ROUND])


def new_head(
    target: ModelConfig, tables: TargetTables, target_ids: NDArray[np.int64], features: Tensor, positions: int
) -> HeadModule:
    """A head that passes the target's highest hidden state on to the target's own output table.

    features: some of the target's, float32 [n, width]; their spread scales the inputs of ``fc``. positions: of a text.
    """
    config = replace(
        target, family="llama", n_layers=1, rope=RopeConfig(target.rope.theta), attn_scale=target.head_dim**-0.5,
        activation="silu", embed_scale=1.0, tie_embeddings=False, qkv_bias=False, qk_norm=False, post_norms=False,
        sliding_window=None, local_layers=(), experts=0, experts_per_token=0,
        intermediate_size=target.intermediate_size * target.mlps_per_token,
    )  # fmt: skip
    head = HeadModule(config, tables.embed, features.shape[1], len(target_ids), positions)
    spread = features.std(0).clamp(min=1e-6)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, _SPREAD * parameter.shape[1] ** -0.5, generator=random)
        head.feature_scale.copy_(1 / spread)
        size = min(config.hidden_size, features.shape[1])
        head.fc.weight.zero_()
        head.fc.weight[:, -size:] = torch.diag(spread[-size:])
        head.norm.weight.copy_(tables.final_norm)
        head.lm_head.weight.copy_(tables.output[torch.from_numpy(target_ids)])
    return head


def config_json(config: ModelConfig, target: str, draft_vocab: int, acceptance: Seq[float]) -> dict[str, Any]:
    """The head's config.json, in the form that SGLang and vLLM read too. The layers it reads are their default."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_context,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab,
        "torch_dtype": "bfloat16",
        "specdec": {
            "target": target,
            "version": specdec.__version__,
            "acceptance": [round(share, 4) for share in acceptance],
        },
    }


def write_head(
    folder: Path, head: HeadModule, target_ids: NDArray[np.int64], config: dict[str, Any], card: str
) -> None:
    """Write model.safetensors, config.json and README.md; each file is complete or as before.

    The target's embedding is not among the tensors: servers share the target's own.

    Raises:
        TrainingError: the disk is full.
    """
    ids = torch.from_numpy(target_ids)
    tensors = {name: value.bfloat16() for name, value in head.published().items()}
    kept = torch.zeros(config["vocab_size"], dtype=torch.bool)
    kept[ids] = True
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": kept}
    files = {
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
        "README.md": card.encode(errors="replace"),
    }
    for name, data in files.items():
        with writing("--out", folder), replacing(folder / name, 0o666) as file:
            file.write(data)
