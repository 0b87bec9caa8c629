"""A model's weights in the layout the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verify_kernels.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    Norms are float32 [hidden] (``q_norm`` and ``k_norm``: [head_dim]) and already hold Gemma's +1.
    ``qkv`` has rows [q; k; v], ``gate_up`` rows [gate; up]; rotary rows are in half-split order.
    """

    attn_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    attn_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    mlp_post_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model.

    ``embed`` is [vocab, hidden], float16 for int8 and bf16, float32 for fp32. ``lm_head`` is always its own
    packed matrix, packed from the embedding where the two are tied.
    """

    embed: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    lm_head: PackedLinear
