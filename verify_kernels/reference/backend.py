"""The kernels in plain torch: the oracle of the native ones, and what runs where those cannot be built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.backend import (
    AttentionSpec,
    BoundLayers,
    ExpertsSpec,
    LayerSpec,
    LinearSpec,
    Prologue,
    linear_parts,
)
from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch
from verify_kernels.packed_weights import (
    CHUNK_K,
    Embedding,
    PackedLinear,
    block_matrix,
    embedding_rows,
    rotate,
    unpack_linear,
)
from verify_kernels.quant_formats import FORMATS, GROUP, BlockMatrix


class ReferenceBackend:
    """Torch twins of the native kernels. Row by row and unpacked: right, simple and slow.

    Rows go through the matrix product one at a time, so that a row's bits do not depend on the others.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def reserve(self, max_rows: int, max_width: int, max_heads_width: int) -> None:
        """Nothing to reserve: torch allocates as it goes."""

    def bind(self, *layers: LayerSpec) -> BoundLayers:
        """See `Backend`; weights are unpacked to float32 once."""
        bound: list[BoundLayers] = []
        for layer in layers:
            if isinstance(layer, LinearSpec):
                bound += [self._linear(spec, weight) for spec, weight in linear_parts(layer)]
            else:
                bound.append(self._experts(layer) if isinstance(layer, ExpertsSpec) else self._attention(layer))

        def op(rows: int, batch: ForwardBatch | None = None) -> None:
            for each in bound:
                each(rows, batch)

        return op

    def _linear(self, spec: LinearSpec, weight: PackedLinear) -> BoundLayers:
        bias, product = weight.bias, _product(weight)

        def op(rows: int, batch: ForwardBatch | None = None) -> None:
            y = product(_prologue(spec, weight.k, spec.src[:rows]))
            if bias is not None:
                y = y + bias[: weight.n]
            dst = spec.dst[:rows, : weight.n]
            if spec.epilogue == "store":
                dst.copy_(y)
            elif spec.epilogue == "add":
                dst.add_(y)
            else:
                assert spec.post_norm is not None
                dst.add_(rms_norm(y, spec.post_norm, spec.eps))

        return op

    def _experts(self, spec: ExpertsSpec) -> BoundLayers:
        gate_up, down = (
            [_product(weight.part(e, spec.experts)) for e in range(spec.experts)]
            for weight in (spec.gate_up, spec.down)
        )

        def op(rows: int, batch: ForwardBatch | None = None) -> None:
            for x, scores in zip(spec.x[:rows], spec.scores[:rows], strict=True):
                chosen = scores.sort(descending=True, stable=True).indices[: spec.chosen]
                over = scores[chosen] if spec.normalise else scores
                shares = (scores[chosen] - over.max()).exp() / (over - over.max()).exp().sum()
                normed = rms_norm(x[None], spec.norm, spec.eps)
                for e, share in zip(chosen.tolist(), shares, strict=True):
                    x += share * down[e](gated(spec.activation, *gate_up[e](normed).chunk(2, dim=1)))[0]

        return op

    def _attention(self, spec: AttentionSpec) -> BoundLayers:
        def op(rows: int, batch: ForwardBatch | None = None) -> None:
            assert batch is not None
            q = write_rows(spec, batch)
            for row in range(batch.rows):
                spec.out[row, : spec.n_heads * spec.head_dim] = attend_row(spec, batch, row, q[row]).reshape(-1)

        return op

    def embed(self, table: Embedding, tokens: NDArray[np.int32], scale: float, out: Tensor) -> None:
        out[: len(tokens)] = embedding_rows(table, torch.from_numpy(tokens).long()) * scale


def _product(packed: PackedLinear) -> Callable[[Tensor], Tensor]:
    if packed.kind in FORMATS:
        matrix, order = block_matrix(packed), slice(None) if packed.order is None else packed.order
        return lambda x: block_linear(x[:, order], matrix)
    weight = unpack_linear(packed)

    def product(x: Tensor) -> Tensor:
        if packed.kind == "int8":
            x = _by_row(rotate, fake_quantise(_by_row(rotate, x)))
        return _by_row(partial(torch.mv, weight), x)

    return product


def _by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of each row alone: torch may multiply several at once in another order."""
    return torch.stack([function(row) for row in x])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def fake_quantise(x: Tensor) -> Tensor:
    """What ``x`` [..., k] is after int8 rounding with one scale per row and 256 channels."""
    parts: list[Tensor] = []
    for part in x.split(CHUNK_K, dim=-1):
        peak = part.abs().amax(-1, keepdim=True)
        inverse = torch.where(peak > 0, 127.0 / peak, 0.0)
        parts.append(torch.round(part * inverse) * (peak / 127.0))
    return torch.cat(parts, dim=-1)


def _prologue(spec: LinearSpec, k: int, x: Tensor) -> Tensor:
    if spec.prologue == "rms":
        assert spec.pre_norm is not None
        return rms_norm(x[:, :k], spec.pre_norm, spec.eps)
    return x[:, :k] if spec.prologue == "none" else gated(spec.prologue, x[:, :k], x[:, k : 2 * k])


def gated(activation: Prologue, gate: Tensor, up: Tensor) -> Tensor:
    """``gate`` after "silu", else tanh-approximated gelu, times ``up``."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., head_dim] turned by angles whose cos and sin [..., head_dim / 2] are broadcast to it."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def write_rows(spec: AttentionSpec, batch: ForwardBatch) -> Tensor:
    """Norm and rotate q and k, write K and V to their slots; returns q [rows, n_heads, head_dim]."""
    n = batch.rows
    qkv = spec.qkv[:n].reshape(n, spec.n_heads + 2 * spec.n_kv_heads, spec.head_dim)
    q, k, v = qkv.split([spec.n_heads, spec.n_kv_heads, spec.n_kv_heads], dim=1)
    if spec.q_norm is not None:
        q = rms_norm(q, spec.q_norm, spec.eps)
    if spec.k_norm is not None:
        k = rms_norm(k, spec.k_norm, spec.eps)
    ctx = batch.entry_ctx[batch.entry_of]
    position = torch.from_numpy(ctx + batch.depth).long()
    cos, sin = spec.cos[position][:, None], spec.sin[position][:, None]
    q, k = rotate_half(q, cos, sin) * spec.scale, rotate_half(k, cos, sin)
    if spec.kv.k_scale is not None:
        q, k = rotate(q), rotate(k)
    slot = ctx + np.arange(n) - batch.entry_start[batch.entry_of]
    page = torch.from_numpy(batch.page_table[batch.entry_of, slot // PAGE_SIZE]).long()
    lane = torch.from_numpy(slot % PAGE_SIZE).long()
    for rows, pool, scales in ((k, spec.kv.k, spec.kv.k_scale), (v, spec.kv.v.transpose(-1, -2), spec.kv.v_scale)):
        if scales is not None:
            peak = rows.abs().amax(-1, keepdim=True)
            scales[page, :, lane] = (peak / 127.0)[..., 0]
            rows = torch.round(rows * torch.where(peak > 0, 127.0 / peak, 0.0))
        pool[page, :, :, lane] = rows.to(pool.dtype)
    return q


def attend_row(spec: AttentionSpec, batch: ForwardBatch, row: int, q: Tensor) -> Tensor:
    """Attention of one row over its keys in logical order; q [n_heads, head_dim]."""
    entry = int(batch.entry_of[row])
    first, ctx = int(batch.entry_start[entry]), int(batch.entry_ctx[entry])
    path: list[int] = []
    node = row - first
    while node >= 0:
        path.append(ctx + node)
        node = int(batch.parent[first + node])
    slots = np.asarray([*range(ctx), *reversed(path)])
    if spec.window:
        slots = slots[-spec.window :]
    page = torch.from_numpy(batch.page_table[entry, slots // PAGE_SIZE]).long()
    lane = torch.from_numpy(slots % PAGE_SIZE).long()
    k, v = spec.kv.k[page, :, :, lane].float(), spec.kv.v[page, :, lane].float()  # [keys, kv_heads, head_dim]
    if spec.kv.k_scale is not None and spec.kv.v_scale is not None:
        k, v = k * spec.kv.k_scale[page, :, lane][..., None], v * spec.kv.v_scale[page, :, lane][..., None]
    k, v = (each.repeat_interleave(spec.n_heads // spec.n_kv_heads, dim=1) for each in (k, v))
    weights = torch.einsum("hd,jhd->hj", q, k).softmax(-1)
    return torch.einsum("hj,jhd->hd", weights, v)


Floats = NDArray[np.float32]


def quantise_groups(x: Floats) -> tuple[NDArray[np.int32], Floats]:
    """int8 values [rows, groups, 32] and scales [rows, groups] of ``x`` [rows, k], k a multiple of 32."""
    grouped = x.reshape(len(x), -1, GROUP)
    peak = np.abs(grouped).max(axis=-1)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(grouped * inverse[..., None]).astype(np.int32), peak / np.float32(127)


def block_linear(x: Tensor, weight: BlockMatrix) -> Tensor:
    """``x`` [rows, k] float32 times the transpose of ``weight``, the very bits of the native kernels."""
    q, activation = quantise_groups(x.numpy())
    n, k = weight.levels.shape
    parts = weight.scale.shape[1] * GROUP // k  # scales of a group
    levels = weight.levels.reshape(n, k // GROUP, parts, -1).astype(np.float64)
    q_parts = q.reshape(len(q), k // GROUP, parts, -1).astype(np.float64)
    total = np.zeros((len(q), n), np.float32)
    for g in range(k // GROUP):
        less_sum = -q[:, g].sum(axis=-1).astype(np.float32)
        for p in range(parts):
            # Sums of products stay below 2^24, so that doubles, whatever their order, and floats hold them exactly.
            dots = (q_parts[:, g, p] @ levels[:, g, p].T).astype(np.float32)
            part = dots * weight.scale[:, g * parts + p]
            if weight.low.any():
                part = fused(weight.low[:, g], less_sum[:, None], part)
            total = fused(part, activation[:, g, None], total)
    return torch.from_numpy(total)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c in one rounding.

    Two floats' product is exact in a double. Its sum with the third is rounded to odd there (to the neighbour whose
    last bit is set), after which rounding to float gives what rounding the exact sum would.
    """
    product = a.astype(np.float64) * b
    third = c.astype(np.float64)
    total = product + third
    back = total - product
    lost = (product - (total - back)) + (third - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    return np.where((lost != 0) & even, np.nextafter(total, towards), total).astype(np.float32)
