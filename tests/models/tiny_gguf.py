"""Writes tiny GGUF files, following llama.cpp's conventions by hand so that the loader has something to differ from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from tests.models.tiny import load_oracle

ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "granitemoe": "granitemoe",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "granite": "granite",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "ministral3": "mistral3",
    "phi3": "phi3",
}
# Architectures whose converter permutes the rows of q and k
_PERMUTED = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES = {"gemma3": _GEMMA_NAMES, "seed_oss": _LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}}


def write_tiny_gguf(
    hf_folder: Path,
    path: Path,
    kind: Kind = Kind.F32,
    *,
    others: dict[str, Kind] | None = None,
    rope_factors: list[float] | None = None,
) -> dict[str, np.ndarray]:
    """Convert a tiny HF model to GGUF with matrices of type ``kind``, or the type in ``others`` for a part such as
    `attn_v`. Returns the stored values by GGUF tensor name."""
    model = load_oracle(hf_folder)
    config = model.config
    family = "gemma3" if config.model_type == "gemma3_text" else config.model_type
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[family])
    _write_shape(writer, config, family)
    _write_vocabulary(writer, hf_folder, config.vocab_size)
    stored = {}
    for name, tensor in gguf_tensors(model, family).items():
        matrix = tensor.ndim > 1 and "ffn_gate_inp" not in name
        use = (others or {}).get(name.split(".")[-2], kind) if matrix else Kind.F32
        raw = gguf.quantize(tensor, use) if use != Kind.F32 else tensor
        stored[name] = gguf.dequantize(raw, use) if use != Kind.F32 else tensor
        writer.add_tensor(name, raw, raw_dtype=use)
    if family == "phi3":
        for name in ("short", "long"):
            factors = np.array(config.rope_parameters[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def gguf_tensors(model: Any, family: str) -> dict[str, np.ndarray]:
    """The model's float32 tensors by GGUF name: q and k permuted as for `llama`, Gemma's norms with their +1."""
    config, out = model.config, {}
    names = _NAMES.get(family, _LAYER_NAMES)
    for name, tensor in model.state_dict().items():
        value = tensor.float()
        if family in ("gemma", "gemma3") and name.endswith("norm.weight"):
            value = value + 1.0
        if name == "lm_head.weight":
            if not config.tie_word_embeddings:
                out["output.weight"] = value.numpy()
        elif name == "model.embed_tokens.weight":
            out["token_embd.weight"] = value.numpy()
        elif name == "model.norm.weight":
            out["output_norm.weight"] = value.numpy()
        elif name.endswith("experts.down_proj"):
            out[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = value.numpy()
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                out[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half.contiguous().numpy()
        else:
            _, _, layer, *middle, kind = name.split(".")
            part = names[".".join(middle)]
            if ARCHITECTURES[family] in _PERMUTED and part in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
                value = interleave(value, heads)
            out[f"blk.{layer}.{part}.{kind}"] = value.contiguous().numpy()
    return out


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Half-split rotary rows to neighbouring pairs, as GGUF files of architecture llama hold them."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def _write_shape(writer: gguf.GGUFWriter, config: Any, family: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float((rope.get("full_attention") or rope)["rope_theta"]))
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family in ("mixtral", "granitemoe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "ministral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if family == "phi3":
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_sliding_window(0)
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)


def _write_vocabulary(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in data["added_tokens"]}
    by_id = {token_id: token for token, token_id in (data["model"]["vocab"] | special).items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(size)]
    types = [3 if token in special else 1 if i in by_id else 5 for i, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_bos_token_id(special[settings["bos_token"]])
    writer.add_eos_token_id(special[settings["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])
