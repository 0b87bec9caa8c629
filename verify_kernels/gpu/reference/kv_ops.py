"""Norm, rotation and write of new KV rows, and moves of accepted ones, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.reference.norm import rms_norm

FP8_LARGEST = 448.0


def write_kv(
    qkv: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    entry_of: Tensor,
    entry_start: Tensor,
    entry_ctx: Tensor,
    depth: Tensor,
    page_table: Tensor,
    eps: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """q_out = rotated q; K and V to their slots; see `verify_kernels.gpu.kv_ops`."""
    rows, heads, head_dim = q_out.shape
    kv_heads = k_pool.shape[1]
    row, entry, ctx = _live_rows(entry_of, entry_start, entry_ctx)
    packed = qkv.view(rows, heads + 2 * kv_heads, head_dim)[row].float()
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm.float(), eps), rms_norm(k, k_norm.float(), eps)
    position = (ctx + depth[row]).clamp(0, cos.shape[0] - 1).long()
    q_out[row] = _rotate(q, cos[position], sin[position]).to(q_out.dtype)
    k = _rotate(k, cos[position], sin[position])

    slot = ctx + row - entry_start[entry]
    listed = (slot >= 0) & (slot < page_table.shape[1] * PAGE_SIZE)
    page = page_table[entry, (slot // PAGE_SIZE).clamp(0, page_table.shape[1] - 1)]
    writes = listed & (page >= 0) & (page < k_pool.shape[0])
    page, lane = page[writes].long(), (slot % PAGE_SIZE)[writes]
    k_pool[page, :, lane] = _stored(k[writes], k_pool.dtype, k_scale)
    v_pool[page, :, lane] = _stored(v[writes], v_pool.dtype, v_scale)


def move_kv(k_pool: Tensor, v_pool: Tensor, source: Tensor, target: Tensor, n_moves: Tensor) -> None:
    """Copy cache rows of all layers, one after the other; see `verify_kernels.gpu.kv_ops`."""
    slots = k_pool.shape[1] * PAGE_SIZE
    for entry, count in enumerate(n_moves.tolist()):
        for a, b in zip(source[entry].tolist()[: max(count, 0)], target[entry].tolist(), strict=False):
            if 0 <= a < slots and 0 <= b < slots:
                for pool in (k_pool, v_pool):
                    pool[:, b // PAGE_SIZE, :, b % PAGE_SIZE] = pool[:, a // PAGE_SIZE, :, a % PAGE_SIZE].clone()


def _live_rows(entry_of: Tensor, entry_start: Tensor, entry_ctx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that lie within their entry, as int64 [n], with their entries and the contexts of these."""
    row = torch.arange(entry_of.shape[0], device=entry_of.device)
    known = (entry_of >= 0) & (entry_of < entry_ctx.shape[0])
    entry = entry_of.where(known, 0).long()
    live = known & (row >= entry_start[entry]) & (row < entry_start[entry + 1])
    return row[live], entry[live], entry_ctx[entry[live]].long()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim], cos and sin [n, head_dim / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x [n, kv_heads, head_dim] as the pool holds it."""
    if scale is not None:
        x = (x / scale[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST)
    return x.to(dtype)
