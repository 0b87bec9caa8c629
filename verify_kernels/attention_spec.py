"""One layer's attention, bound to its buffers and its slice of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """q/k norm, rotary embedding, KV write, then tree attention.

    qkv: float32 [max_rows, (n_heads + 2 n_kv_heads) head_dim]; out: float32 [max_rows, n_heads head_dim].
    cos, sin: float32 [positions, head_dim / 2], half-split convention.
    k_pool: float32 [pages, n_kv_heads, head_dim, 64] (transposed: one load serves 16 keys);
    v_pool: float32 [pages, n_kv_heads, 64, head_dim].
    window: a row at position p sees keys at positions > p - window; 0 sees all up to p.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    window: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    qkv: Tensor
    out: Tensor
    k_pool: Tensor
    v_pool: Tensor
