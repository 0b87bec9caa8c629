"""The expected packed weights of a model, directly from the transformers state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.models.weights import LayerWeights, ModelWeights
from verify_kernels.packed_weights import unpack_linear


def expected_layer(state: dict[str, Tensor], i: int, one: float) -> dict[str, Tensor]:
    """The fused matrices and norms of layer ``i`` by the names of `LayerWeights`.

    one: what norms are stored without.
    """
    p = f"model.layers.{i}."
    attention, mlp = p + "self_attn.", p + "mlp."
    if (fused := attention + "qkv_proj.weight") in state:
        qkv = _rotated_first(state[fused])
    else:
        qkv = torch.cat([state[attention + f"{x}_proj.weight"] for x in "qkv"])
    out = {
        "qkv": qkv,
        "o": state[attention + "o_proj.weight"],
        "attn_norm": state[p + "input_layernorm.weight"] + one,
    }
    sparse = p + "block_sparse_moe."
    mlp = sparse if sparse + "router.weight" in state else mlp
    if mlp + "experts.gate_up_proj" in state:  # [experts, 2 ffn, hidden] and [experts, hidden, ffn]
        out["router"] = state[mlp + ("router.weight" if mlp == sparse else "gate.weight")]
        out["gate_up"], out["down"] = (state[f"{mlp}experts.{x}_proj"].flatten(0, 1) for x in ("gate_up", "down"))
    else:
        fused = mlp + "gate_up_proj.weight"
        parts = [mlp + "gate_proj.weight", mlp + "up_proj.weight"] if fused not in state else [fused]
        out["gate_up"] = torch.cat([state[part] for part in parts])
        out["down"] = state[mlp + "down_proj.weight"]
    if attention + "q_proj.bias" in state:
        out["qkv_bias"] = torch.cat([state[attention + f"{x}_proj.bias"] for x in "qkv"])
    for norm in ("q_norm", "k_norm"):
        if attention + norm + ".weight" in state:
            out[norm] = state[attention + norm + ".weight"] + one
    if p + "pre_feedforward_layernorm.weight" in state:
        out["attn_post_norm"] = state[p + "post_attention_layernorm.weight"] + 1.0
        out["mlp_norm"] = state[p + "pre_feedforward_layernorm.weight"] + 1.0
        out["mlp_post_norm"] = state[p + "post_feedforward_layernorm.weight"] + 1.0
    else:
        out["mlp_norm"] = state[p + "post_attention_layernorm.weight"] + one
    return out


def _rotated_first(qkv: Tensor) -> Tensor:
    """The tiny Phi's rows: of each of the six heads of 16 rows of q and k, 12 are rotated."""
    heads = qkv[: 6 * 16].view(6, 16, -1)
    first, second, rest, last = heads.split([6, 6, 2, 2], dim=1)
    return torch.cat([torch.cat([first, rest, second, last], dim=1).flatten(0, 1), qkv[6 * 16 :]])


def found_layer(layer: LayerWeights) -> dict[str, Tensor]:
    """The same of a loaded layer, unpacked."""
    out = {name: unpack_linear(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")}
    if layer.router is not None:
        out["router"] = unpack_linear(layer.router)
    if layer.qkv.bias is not None:
        out["qkv_bias"] = layer.qkv.bias[: layer.qkv.n]
    norms = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "attn_post_norm", "mlp_post_norm")
    out.update({name: getattr(layer, name) for name in norms if getattr(layer, name) is not None})
    return out


def differences(weights: ModelWeights, oracle: Any, tolerance: float = 0.0) -> list[str]:
    """Names of weights that differ from the oracle's by more than ``tolerance``; float32 weights only."""

    def equal(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)

    state = oracle.state_dict()
    one = 1.0 if oracle.config.model_type in ("gemma", "gemma3_text") else 0.0
    wrong = []
    if not equal(weights.embed, state["model.embed_tokens.weight"]):
        wrong.append("embed")
    if not equal(unpack_linear(weights.lm_head), state["lm_head.weight"]):
        wrong.append("lm_head")
    final_norm = (state["model.norm.weight"] + one) / getattr(oracle.config, "logits_scaling", 1.0)
    if not equal(weights.final_norm, final_norm):
        wrong.append("final_norm")
    for i, layer in enumerate(weights.layers):
        expected, found = expected_layer(state, i, one), found_layer(layer)
        names = expected.keys() | found.keys()
        wrong += [
            f"layers.{i}.{name}"
            for name in sorted(names)
            if name not in expected or name not in found or not equal(expected[name], found[name])
        ]
    return wrong
