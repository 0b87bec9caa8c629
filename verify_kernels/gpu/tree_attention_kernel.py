"""First kernel of tree attention: partial softmaxes over stretches of keys, one work item after the other."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.attention_plan_work import (
    CONTEXT,
    DIVERGE,
    ENTRY,
    GATHER_STOP,
    LEAF,
    LEAF_DEPTH,
    NODE_FIRST,
    NODE_STOP,
    START,
    TILE_FIRST,
    TILE_STOP,
    UNIT,
    WORK_FIELDS,
)
from verify_kernels.gpu.tree_attention_math import NONE, add_values, fold, weigh

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


@triton.jit(
    do_not_specialize=[
        "k_scale", "page_table", "depth_ptr",
        "window", "n_rows", "n_heads", "n_kv", "group", "max_pages", "n_pages", "max_path",
    ]
)  # fmt: skip
def tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale, page_table, depth_ptr, path, work_list, header, partials, peaks,
    scale, q_stride, window, n_rows, n_heads, n_kv, group, max_pages, n_pages, max_path,
    HEAD_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr,
    SEG_TILES: tl.constexpr, FOLDS: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th (work item, KV head); see `verify_kernels.gpu.attention_plan_work`.

    A tile of LANES keys lies within one page. Keys of committed pages come by scalar page ids, those of a path by an
    index list; both go through the same operations. Partial softmaxes go to partials [slot, head, dim] and peaks
    [slot, head, 2] = (peak, total), slot = row * units + unit.
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
        factor = scale
        if SCALED:
            factor = factor * tl.load(k_scale + head)
        row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
        q_at = row.to(tl.int64) * q_stride + (head * group + member) * HEAD_DIM
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        if SCALED:
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
            if FOLDS:  # noqa: SIM102 - known when compiled, the other is not
                if (tile % (SEG_TILES * per_page) == 0) & (tile > first):
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
        elif FOLDS:
            peak, total, acc = fold(block_peak, block_total, block_acc, peak, total, acc, factor)

        if tl.maximum(stop, gather_stop) > first:
            # Rows are worked out anew for each store: nothing of them has to live through the loops.
            units = tl.load(header + 1)
            row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
            slot = (row.to(tl.int64) * units + tl.load(work + UNIT)) * n_heads + head * group + member
            tl.store(peaks + slot * 2, peak, mask=live)
            tl.store(peaks + slot * 2 + 1, total, mask=live)
            row, member, live = work_rows(work, path, max_path, n_rows, group, BLOCK_M)
            slot = (row.to(tl.int64) * units + tl.load(work + UNIT)) * n_heads + head * group + member
            mask = live[:, None] & (d < HEAD_DIM)[None, :]
            tl.store(partials + slot[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
