# mypy: disallow-untyped-defs=False

"""Tree attention over a paged KV cache: trees, prefill chunks and plain decode in one pass."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.attention_workspace import (
    CONTEXT,
    DIVERGE,
    ENTRY,
    GATHER_STOP,
    HEAD_DIMS,
    LEAF,
    LEAF_DEPTH,
    NODE_FIRST,
    NODE_STOP,
    SEGMENT_TILES,
    SPLIT,
    START,
    TILE,
    TILE_FIRST,
    TILE_STOP,
    WORK_FIELDS,
    AttentionTile,
    AttentionWorkspace,
    attention_tile,
)
from verify_kernels.gpu.kernel_launch import (
    CHIPS,
    FP8,
    CompileCase,
    StepRows,
    await_before_linear,
    await_previous,
    launch_options,
    release_next,
    specialised_on,
)

NONE = tl.constexpr(float("-inf"))
FEW_BLOCKS = tl.constexpr(2)  # a row with at most so many blocks sums them at once; changes results bitwise


@triton.jit
def weigh(q, k, seen, peak, factor, MASKED: tl.constexpr):
    """Weights of a tile's keys relative to the running peak of raw scores, and what shrinks all before them.

    q [rows, dim], k [lanes, dim]; seen [rows, lanes] where MASKED; peak [rows], raw; factor: scale * log2(e).
    Returns the new peak, weights [rows, lanes] and shrink [rows]. A row that sees nothing keeps its state bit by bit.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, NONE)
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == NONE, 0.0, highest)  # -inf - -inf is no number
    # Written as fma: kernels compile without fusion, so that the same source has the same roundings everywhere.
    weights = tl.exp2(tl.fma(scores, factor, -(base * factor)[:, None]))
    return highest, weights, tl.exp2((peak - base) * factor)


@triton.jit
def add_values(weights, shrink, v, total, acc, OPERAND: tl.constexpr):
    """total [rows] and acc [rows, dim] with the tile's weights and weighted values v [lanes, dim] added."""
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc * shrink[:, None], input_precision="ieee")
    return total, acc


@triton.jit
def fold(peak, total, acc, peak_2, total_2, acc_2, factor):
    """Two softmaxes over different keys as one: peak, total [rows], acc [rows, dim].

    Folding an empty one in (peak -inf, zeros) changes no bit.
    """
    highest = tl.maximum(peak, peak_2)
    base = tl.where(highest == NONE, 0.0, highest)
    shrink = tl.exp2((peak - base) * factor)
    shrink_2 = tl.exp2((peak_2 - base) * factor)
    total = tl.fma(total, shrink, total_2 * shrink_2)
    acc = tl.fma(acc, shrink[:, None], acc_2 * shrink_2[:, None])
    return highest, total, acc


FAR = tl.constexpr(2**31 - 2)


@triton.jit
def path_node(work, path, max_path, node, mask):
    """Rows of the entry that are the nodes at depths ``node`` of a work item's path."""
    leaf = tl.load(work + START) + tl.load(work + LEAF)
    back = tl.load(work + LEAF_DEPTH) - node
    off = mask & (node >= tl.load(work + DIVERGE)) & (back >= 0) & (back < max_path)
    return tl.where(off, tl.load(path + leaf.to(tl.int64) * max_path + back, mask=off, other=0), node)


@triton.jit
def work_rows(work, path, max_path, n_rows, group, BLOCK_M: tl.constexpr):
    """Row, head within the group, and whether there is one, of every packed row of a work item's tile."""
    packed = tl.load(work + NODE_FIRST) * group + tl.arange(0, BLOCK_M)
    node = packed // group
    start = tl.load(work + START)
    live = node < tl.load(work + NODE_STOP)
    row = start + path_node(work, path, max_path, node, live)
    return tl.minimum(row, n_rows - 1), packed % group, live


@specialised_on("q_ptr", "k_ptr", "v_ptr", "path", "work_list", "header", "partials", "peaks", "q_stride")
def tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table, depth_ptr, path, work_list, header, partials, peaks,
    factor, q_stride, window, n_rows, n_heads, n_kv, group, max_pages, n_pages, max_path,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr,
    FOLD_EVERY: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th (work item, KV head); see `verify_kernels.gpu.attention_workspace`.

    A tile of LANES keys lies within one page. Keys of committed pages come by scalar page ids, those of a path by an
    index list; both go through the same operations. Partial softmaxes go to partials [slot, head, dim] and peaks
    [slot, head, 2] = (peak, total), slot = row * splits + split. FOLD_EVERY: tiles of LANES keys to a segment, where a
    block has several; else 0.
    """
    per_page: tl.constexpr = 64 // LANES
    items = tl.load(header) * n_kv
    lane = tl.arange(0, LANES)
    d = tl.arange(0, DIM_BLOCK)
    in_page = lane[:, None] * HEAD_DIM + d[None, :]
    page_stride = (n_kv * 64 * HEAD_DIM).to(tl.int64)
    # Without licm, or a hundred addresses of prologue and epilogue would be kept, and spilled, across the loop.
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        head = item % n_kv
        work = work_list + (item // n_kv) * WORK_FIELDS
        row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
        q_at = row.to(tl.int64) * q_stride + (head * group + member) * HEAD_DIM
        await_previous()
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            # float8 values are float16 values; queries beyond float16 are not met, and must not become infinite.
            q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
        ctx = tl.load(work + CONTEXT)
        first = tl.load(work + TILE_FIRST) * per_page
        stop = tl.load(work + TILE_STOP) * per_page
        gather_stop = tl.load(work + GATHER_STOP) * per_page
        lowest = tl.full([BLOCK_M], FAR, tl.int32)
        if WINDOWED:
            position = ctx + tl.load(depth_ptr + row, mask=live, other=0)
            lowest = tl.where(live, position - window + 1, lowest)
            first = tl.maximum(first, tl.minimum(tl.maximum(tl.min(lowest), 0), FAR) // LANES)

        peak = tl.full([BLOCK_M], NONE, tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([BLOCK_M, DIM_BLOCK], 0.0, tl.float32)
        block_peak, block_total, block_acc = peak, total, acc
        pages = page_table + tl.load(work + ENTRY).to(tl.int64) * max_pages
        k_head = k_ptr + head * (64 * HEAD_DIM)
        v_head = v_ptr + head * (64 * HEAD_DIM)
        page = tl.load(pages + tl.minimum(first // per_page, max_pages - 1))
        for tile in tl.range(first, stop, num_stages=STAGES):
            known = tl.minimum(tl.maximum(page, 0), n_pages - 1)  # ids that are none must not fault
            at = known.to(tl.int64) * page_stride + tile % per_page * (LANES * HEAD_DIM)
            page = tl.load(pages + tl.minimum((tile + 1) // per_page, max_pages - 1))
            if HEAD_DIM == DIM_BLOCK:
                k = tl.load(k_head + at + in_page)
                v = tl.load(v_head + at + in_page)
            else:
                k = tl.load(k_head + at + in_page, mask=(d < HEAD_DIM)[None, :], other=0.0)
                v = tl.load(v_head + at + in_page, mask=(d < HEAD_DIM)[None, :], other=0.0)
            if FOLD_EVERY:  # noqa: SIM102 - known when compiled, the other is not
                if (tile % FOLD_EVERY == 0) & (tile > first):
                    block_peak, block_total, block_acc = fold(
                        block_peak, block_total, block_acc, peak, total, acc, factor
                    )
                    peak = tl.full([BLOCK_M], NONE, tl.float32)
                    total = tl.full([BLOCK_M], 0.0, tl.float32)
                    acc = tl.full([BLOCK_M, DIM_BLOCK], 0.0, tl.float32)
            seen = (tile * LANES + lane)[None, :] >= lowest[:, None]
            peak, weights, shrink = weigh(q, k, seen, peak, factor, WINDOWED)
            total, acc = add_values(weights, shrink, v, total, acc, q.dtype)

        if gather_stop > 0:
            row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
            position = ctx + tl.load(depth_ptr + row, mask=live, other=0)
            reach = tl.load(work + NODE_STOP)
            for tile in tl.range(tl.maximum(stop, first), gather_stop, num_stages=1):
                key = tile * LANES + lane
                node = key - ctx
                slot = ctx + path_node(work, path, max_path, node, node < reach)
                there = (node < reach) & (slot < max_pages * 64)
                key_page = tl.load(pages + slot // 64, mask=there, other=0)
                key_page = tl.minimum(tl.maximum(key_page, 0), n_pages - 1)
                at = key_page.to(tl.int64) * page_stride + slot % 64 * HEAD_DIM
                # Slots never written may hold anything: their lanes must be zeros, for 0 * nan is nan.
                mask = there[:, None] & (d < HEAD_DIM)[None, :]
                k = tl.load(k_head + at[:, None] + d[None, :], mask=mask, other=0.0)
                v = tl.load(v_head + at[:, None] + d[None, :], mask=mask, other=0.0)
                seen = key[None, :] <= position[:, None]
                if WINDOWED:
                    seen = seen & (key[None, :] >= lowest[:, None])
                peak, weights, shrink = weigh(q, k, seen, peak, factor, True)
                total, acc = add_values(weights, shrink, v, total, acc, q.dtype)
        elif FOLD_EVERY:
            peak, total, acc = fold(block_peak, block_total, block_acc, peak, total, acc, factor)

        if tl.maximum(stop, gather_stop) > first:
            # Row indices are recomputed for each store, so they take no registers during the loops.
            splits = tl.load(header + 1)
            row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
            slot = (row.to(tl.int64) * splits + tl.load(work + SPLIT)) * n_heads + head * group + member
            tl.store(peaks + slot * 2, peak, mask=live)
            tl.store(peaks + slot * 2 + 1, total, mask=live)
            row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
            slot = (row.to(tl.int64) * splits + tl.load(work + SPLIT)) * n_heads + head * group + member
            mask = live[:, None] & (d < HEAD_DIM)[None, :]
            tl.store(partials + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
    await_previous()


@triton.jit
def sum_blocks(
    first_block, partials, peaks, head, base, folded_blocks, first, last, committed, factor, n_heads,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, FOLD_SEGS: tl.constexpr,
):  # fmt: skip
    """peak, total [1] and acc [1, dim] of BLOCKS blocks from ``first_block`` on.

    The first ``folded_blocks`` of a row have one partial sum each, others FOLD_SEGS, which are folded here. PARTS: 1 if
    all of these blocks have one, else FOLD_SEGS; with either, one of them has the same bits.
    """
    block_tiles: tl.constexpr = SEGMENT_TILES * FOLD_SEGS
    d = tl.arange(0, DIM_BLOCK)
    block = first_block + tl.arange(0, BLOCKS)
    b_peak = tl.full([BLOCKS], NONE, tl.float32)
    b_total = tl.full([BLOCKS], 0.0, tl.float32)
    b_acc = tl.full([BLOCKS, DIM_BLOCK], 0.0, tl.float32)
    folded = block < folded_blocks
    for j in tl.static_range(PARTS):
        segment = block * FOLD_SEGS + j
        # The short chunk at the end of the committed pages is another split than the path's own segment.
        own = (last > committed) & (committed % SEGMENT_TILES > 0) & (segment >= committed // SEGMENT_TILES)
        split = 1 + tl.where(folded, block, segment - folded_blocks * (FOLD_SEGS - 1) + own.to(tl.int32))
        end = tl.where(folded, (block + 1) * block_tiles, (segment + 1) * SEGMENT_TILES)
        # What lies wholly before the window was not computed.
        there = tl.where(folded, j == 0, segment * SEGMENT_TILES < last) & (end > first)
        at = (base + split) * n_heads + head
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
    return c_peak, c_total, c_acc


@specialised_on("partials", "peaks", "out", "header")
def tree_attention_combine_kernel(
    partials, peaks, out, entry_of, entry_start, entry_ctx, depth, header,
    factor, window, n_entries, n_heads,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FOLD_SEGS: tl.constexpr,
):  # fmt: skip
    """One program per (row, head): segments are folded into blocks, and BLOCKS blocks are summed at a time.

    Up to FEW_BLOCKS blocks are summed at once, as a lane without a block costs as much as another. Which blocks go
    together, and the order of their sum, follow from the row's position alone.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    entry = tl.load(entry_of + row)
    known = (entry >= 0) & (entry < n_entries)
    entry = tl.where(known, entry, 0)
    if known & (row >= tl.load(entry_start + entry)) & (row < tl.load(entry_start + entry + 1)):
        ctx = tl.load(entry_ctx + entry)
        position = ctx + tl.load(depth + row)
        committed = ctx // 64
        last = position // 64
        first = tl.where(window > 0, tl.maximum(position - window + 1, 0) // 64, 0)
        splits = tl.load(header + 1)
        blocks = tl.where(tl.load(header + 2) > 0, committed // (SEGMENT_TILES * FOLD_SEGS), 0)
        base = row.to(tl.int64) * splits
        d = tl.arange(0, DIM_BLOCK)
        peak = tl.full([1], NONE, tl.float32)
        total = tl.full([1], 0.0, tl.float32)
        acc = tl.full([1, DIM_BLOCK], 0.0, tl.float32)
        block_tiles: tl.constexpr = SEGMENT_TILES * FOLD_SEGS
        n_blocks = tl.where(first < last, (last + block_tiles - 1) // block_tiles, 0)
        await_before_linear()
        sums = (partials, peaks, head, base, blocks, first, last, committed, factor, n_heads)
        if n_blocks > FEW_BLOCKS:
            for block in tl.range(first // block_tiles // BLOCKS * BLOCKS, n_blocks, BLOCKS):
                if tl.minimum(block + BLOCKS, n_blocks) <= blocks:
                    c_peak, c_total, c_acc = sum_blocks(block, *sums, HEAD_DIM, DIM_BLOCK, BLOCKS, 1, FOLD_SEGS)
                else:
                    c_peak, c_total, c_acc = sum_blocks(block, *sums, HEAD_DIM, DIM_BLOCK, BLOCKS, FOLD_SEGS, FOLD_SEGS)
                peak, total, acc = fold(peak, total, acc, c_peak, c_total, c_acc, factor)
        elif n_blocks > 0:
            peak, total, acc = sum_blocks(0, *sums, HEAD_DIM, DIM_BLOCK, FEW_BLOCKS, FOLD_SEGS, FOLD_SEGS)
        at = base * n_heads + head + tl.full([1], 0, tl.int64)
        own_peak = tl.load(peaks + at * 2)
        own_total = tl.load(peaks + at * 2 + 1)
        own_acc = tl.load(partials + at[:, None] * HEAD_DIM + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
        peak, total, acc = fold(peak, total, acc, own_peak, own_total, own_acc, factor)
        result = acc / total[:, None]
        out_at = (row.to(tl.int64) * n_heads + head) * HEAD_DIM + d
        release_next()
        tl.store(out + out_at[None, :], result.to(out.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
    await_previous()


COMBINE_BLOCKS = 8  # blocks of keys summed at a time; changes results bitwise
# A product and a sum are fused where the source says so, nowhere else: two loops must round alike.
EXACT = {"enable_fp_fusion": False}
# Rows are short: more threads would mostly repeat each other's addresses.
COMBINE_OPTIONS = {"num_warps": 2, "num_stages": 1, **EXACT}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": FP8}


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    step: StepRows,
    workspace: AttentionWorkspace,
    *,
    scale: float,
    window: int = 0,
) -> None:
    """out = attention of every row to the keys at positions 0 .. its own, on its own path. Two launches.

    The plan is read before the first of them waits (`await_only`), so another launch must stand between the plan's
    and these, as `write_kv` does.

    q: [rows, heads, head_dim]; rows may be apart by a multiple of 16 values, so a view of qkv works. k_pool, v_pool:
    one layer's [pages, kv_heads, 64, head_dim], into which K and V of the rows are written already; of q's dtype, or
    float8 e4m3 for q of two bytes; products are float16 then. out: [rows, heads, head_dim], q's dtype. workspace: of
    these heads and types, holds the plan that `attention_plan` made for ``step``. scale: of the scores, above 0 and
    finite. window: a row at position p sees keys at positions > p - window; 0: all.

    Every row gets the bits that decoding its path token by token gives it, see
    `verify_kernels.gpu.attention_workspace`. Masks need no ancestor words: rows are grouped by leaf path, on which a
    mask is a comparison of positions, for trees of any size. Padding rows are left alone.
    """
    (rows,), (entries, pages) = step.depth.shape, step.page_table.shape
    ws, windowed = workspace, window > 0
    tile = ws.tile(rows, entries, windowed=windowed)
    block = triton.next_power_of_2(ws.head_dim)
    items = ws.work.shape[0] * ws.kv_heads
    base_2 = scale * math.log2(math.e)
    tree_attention_kernel[(min(items, ws.processors * tile.resident),)](
        q, k_pool, v_pool, step.page_table, step.depth, ws.path, ws.work, ws.header, ws.partials, ws.peaks,
        base_2, q.stride(0), window, rows, ws.heads, ws.kv_heads, ws.group, pages, k_pool.shape[0],
        ws.max_branch, HEAD_DIM=ws.head_dim, DIM_BLOCK=block, WINDOWED=windowed,
        **_tile_constants(tile), **launch_options(_tile_options(tile), ws.chip),
    )  # fmt: skip
    tree_attention_combine_kernel[(rows, ws.heads)](
        ws.partials, ws.peaks, out, step.entry_of, step.entry_start, step.entry_ctx, step.depth, ws.header,
        base_2, window, entries, ws.heads,
        HEAD_DIM=ws.head_dim, DIM_BLOCK=block, BLOCKS=COMBINE_BLOCKS, FOLD_SEGS=tile.fold_segs,
        **launch_options(COMBINE_OPTIONS, ws.chip),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every head size, KV type and tile of every chip, with and without a window."""
    kinds = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv")]
    cases = []
    for chip in CHIPS:
        for head_dim in HEAD_DIMS:
            for q_type, kv_type in kinds:
                for windowed in (False, True):
                    kv = TYPES[kv_type]
                    tiles = {attention_tile(chip, head_dim, kv, windowed=windowed, wide=w) for w in (False, True)}
                    cases += [
                        _attention_case(chip, head_dim, q_type, kv_type, windowed, tile)
                        for tile in sorted(tiles, key=lambda tile: tile.block_m)
                    ]
    folds = {(d, attention_tile(chip, d, torch.bfloat16).fold_segs) for chip in CHIPS for d in HEAD_DIMS}
    return cases + [
        _combine_case(head_dim, fold_segs, q_type)
        for head_dim, fold_segs in sorted(folds)
        for q_type in ("bf16", "fp16")
    ]


def _tile_constants(tile: AttentionTile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "LANES": tile.lanes,
        "FOLD_EVERY": int(SEGMENT_TILES) * TILE // tile.lanes if tile.fold_segs > 1 else 0,
        "STAGES": tile.stages,
    }


def _tile_options(tile: AttentionTile) -> dict[str, int | bool]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **EXACT}


def _attention_case(
    chip: str, head_dim: int, q_type: str, kv_type: str, windowed: bool, tile: AttentionTile
) -> CompileCase:
    shape = {"HEAD_DIM": head_dim, "DIM_BLOCK": triton.next_power_of_2(head_dim)}
    rows = "fp16 over " if kv_type == "fp8e4nv" and q_type == "fp16" else ""
    return CompileCase.of(
        f"attend {chip} {head_dim} {rows}{kv_type} tile {tile.block_m}{' window' if windowed else ''}",
        tree_attention_kernel,
        {**shape, "WINDOWED": windowed, **_tile_constants(tile)},
        {"q_ptr": f"*{q_type}", "k_ptr": f"*{kv_type}", "v_ptr": f"*{kv_type}"},
        divisible=("q_stride",),
        options=_tile_options(tile),
        targets=(chip,),
        resident=tile.resident,
    )


def _combine_case(head_dim: int, fold_segs: int, q_type: str) -> CompileCase:
    shape = {"HEAD_DIM": head_dim, "DIM_BLOCK": triton.next_power_of_2(head_dim)}
    return CompileCase.of(
        f"combine {head_dim} by {fold_segs} {q_type}",
        tree_attention_combine_kernel,
        {**shape, "BLOCKS": COMBINE_BLOCKS, "FOLD_SEGS": fold_segs},
        {"out": f"*{q_type}"},
        options=COMBINE_OPTIONS,
        targets=tuple(c for c in CHIPS if attention_tile(c, head_dim, torch.bfloat16).fold_segs == fold_segs),
    )
