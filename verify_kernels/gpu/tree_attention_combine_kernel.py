"""Second kernel of tree attention: a row's partial softmaxes, put together in the order of its keys."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.tree_attention_math import NONE, fold


@triton.jit(
    do_not_specialize=[
        "entry_of", "entry_start", "entry_ctx", "depth", "k_scale", "v_scale",
        "window", "n_entries", "n_heads", "group",
    ]
)  # fmt: skip
def tree_attention_combine_kernel(
    partials, peaks, out, entry_of, entry_start, entry_ctx, depth, header, k_scale, v_scale,
    scale, window, n_entries, n_heads, group,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SEG_TILES: tl.constexpr, FOLD_SEGS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One program per (row, head): segments are folded into blocks, BLOCKS blocks are summed at a time.

    Which blocks go together, and the order of their sum, follow from the row's position alone.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.load(entry_of + row)
    known = (entry >= 0) & (entry < n_entries)
    entry = tl.where(known, entry, 0)
    if known & (row >= tl.load(entry_start + entry)) & (row < tl.load(entry_start + entry + 1)):
        factor = scale
        if SCALED:
            factor = factor * tl.load(k_scale + head // group)
        ctx = tl.load(entry_ctx + entry)
        position = ctx + tl.load(depth + row)
        committed = ctx // 64
        last = position // 64
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0) // 64, 0)
        units = tl.load(header + 1)
        blocks = tl.where(tl.load(header + 2) > 0, committed // (SEG_TILES * FOLD_SEGS), 0)
        base = row.to(tl.int64) * units
        d = tl.arange(0, DIM_BLOCK)
        i = tl.arange(0, BLOCKS)
        peak = tl.full([1], NONE, tl.float32)
        total = tl.full([1], 0.0, tl.float32)
        acc = tl.full([1, DIM_BLOCK], 0.0, tl.float32)
        block_tiles: tl.constexpr = SEG_TILES * FOLD_SEGS
        n_blocks = tl.where(first < last, (last + block_tiles - 1) // block_tiles, 0)
        for chunk in tl.range(first // block_tiles // BLOCKS * BLOCKS, n_blocks, BLOCKS):
            b_peak = tl.full([BLOCKS], NONE, tl.float32)
            b_total = tl.full([BLOCKS], 0.0, tl.float32)
            b_acc = tl.full([BLOCKS, DIM_BLOCK], 0.0, tl.float32)
            block = chunk + i
            folded = block < blocks  # these are their own only part
            for j in tl.static_range(FOLD_SEGS):
                segment = block * FOLD_SEGS + j
                # The short stretch at the end of the committed pages is another unit than the path's own segment.
                own = (last > committed) & (committed % SEG_TILES > 0) & (segment >= committed // SEG_TILES)
                unit = 1 + tl.where(folded, block, segment - blocks * (FOLD_SEGS - 1) + own.to(tl.int32))
                end = tl.where(folded, (block + 1) * block_tiles, (segment + 1) * SEG_TILES)
                # What lies wholly before the window was not computed.
                there = tl.where(folded, j == 0, segment * SEG_TILES < last) & (end > first)
                at = (base + unit) * n_heads + head
                full = there[:, None] & (d < HEAD_DIM)[None, :]
                s_peak = tl.load(peaks + at * 2, mask=there, other=NONE)
                s_total = tl.load(peaks + at * 2 + 1, mask=there, other=0.0)
                s_acc = tl.load(partials + at[:, None] * HEAD_DIM + d[None, :], mask=full, other=0.0)
                b_peak, b_total, b_acc = fold(b_peak, b_total, b_acc, s_peak, s_total, s_acc, factor)
            highest = tl.max(b_peak, 0)
            weight = tl.exp2((b_peak - tl.where(highest == NONE, 0.0, highest)) * factor)
            c_peak = tl.full([1], 0.0, tl.float32) + highest
            c_total = tl.full([1], 0.0, tl.float32) + tl.sum(b_total * weight, 0)
            c_acc = tl.sum(b_acc * weight[:, None], 0)[None, :]
            peak, total, acc = fold(peak, total, acc, c_peak, c_total, c_acc, factor)
        at = base * n_heads + head + tl.full([1], 0, tl.int64)
        own_peak = tl.load(peaks + at * 2)
        own_total = tl.load(peaks + at * 2 + 1)
        own_acc = tl.load(partials + at[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
        peak, total, acc = fold(peak, total, acc, own_peak, own_total, own_acc, factor)
        result = acc / total[:, None]
        if SCALED:
            result = result * tl.load(v_scale + head // group)
        out_at = (row.to(tl.int64) * n_heads + head) * HEAD_DIM + d
        tl.store(out + out_at[None, :], result.to(out.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
