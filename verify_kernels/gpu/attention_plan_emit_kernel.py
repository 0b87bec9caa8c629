"""Second kernel of the attention plan: cuts every entry's keys and rows into work items."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.attention_plan_kernel import entry_context, entry_rows, path_segments, tile_heads
from verify_kernels.gpu.attention_plan_work import (
    CONTEXT,
    DIVERGE,
    ENTRY,
    GATHER_STOP,
    LEAF,
    LEAF_DEPTH,
    NEVER,
    NODE_FIRST,
    NODE_STOP,
    START,
    TILE_FIRST,
    TILE_STOP,
    UNIT,
    WORK_FIELDS,
)


@triton.jit
def put_work(
    work_list, index, mask, entry, start, ctx, node_first, node_stop, tile_first, tile_stop, gather_stop,
    leaf, leaf_depth, diverge, unit,
):  # fmt: skip
    """Write one record per lane."""
    work = work_list + index * WORK_FIELDS
    tl.store(work + ENTRY, entry, mask=mask)
    tl.store(work + START, start, mask=mask)
    tl.store(work + CONTEXT, ctx, mask=mask)
    tl.store(work + NODE_FIRST, node_first, mask=mask)
    tl.store(work + NODE_STOP, node_stop, mask=mask)
    tl.store(work + TILE_FIRST, tile_first, mask=mask)
    tl.store(work + TILE_STOP, tile_stop, mask=mask)
    tl.store(work + GATHER_STOP, gather_stop, mask=mask)
    tl.store(work + LEAF, leaf, mask=mask)
    tl.store(work + LEAF_DEPTH, leaf_depth, mask=mask)
    tl.store(work + DIVERGE, diverge, mask=mask)
    tl.store(work + UNIT, unit, mask=mask)


@triton.jit
def committed_stretches(tiles, coarse, seg_tiles, fold_segs):
    """Blocks and all stretches that ``tiles`` whole pages are read in: coarse plans read blocks as far as they go."""
    blocks = tl.where(coarse, tiles // (seg_tiles * fold_segs), 0)
    return blocks, blocks + tl.cdiv(tiles - blocks * seg_tiles * fold_segs, seg_tiles)


@triton.jit
def emit_committed(
    work_list, base, capacity, entry, start, n, ctx, nodes, coarse, seg_tiles, fold_segs, LANES: tl.constexpr
):  # fmt: skip
    """Work on committed pages: all tiles of an entry's rows for the first stretch of keys, then for the next one."""
    i = tl.arange(0, LANES)
    tiles = ctx // 64
    blocks, stretches = committed_stretches(tiles, coarse, seg_tiles, fold_segs)
    row_tiles = tl.cdiv(n, nodes)
    for offset in tl.range(0, row_tiles * stretches, LANES):
        at = offset + i
        stretch = at // row_tiles
        node = at % row_tiles * nodes
        whole = stretch < blocks
        first = tl.where(whole, stretch * fold_segs, stretch + blocks * (fold_segs - 1)) * seg_tiles
        stop = tl.minimum(first + tl.where(whole, fold_segs, 1) * seg_tiles, tiles)
        put_work(
            work_list, base + at, (at < row_tiles * stretches) & (base + at < capacity), entry, start, ctx,
            node, tl.minimum(node + nodes, n), first, stop, 0, 0, 0, NEVER, 1 + stretch,
        )  # fmt: skip


@triton.jit
def emit_paths(
    work_list, base, capacity, entry, start, n, ctx, depth, leaf_of, diverge, top, nodes, max_pages,
    coarse, seg_tiles, fold_segs, LANES: tl.constexpr,
):  # fmt: skip
    """Work on leaf paths: of every tile of their rows the last tile of keys, then segments that are not shared."""
    i = tl.arange(0, LANES)
    tiles = ctx // 64
    blocks, _ = committed_stretches(tiles, coarse, seg_tiles, fold_segs)
    for offset in tl.range(0, n, LANES):
        begins, leaf, leaf_depth, node, stop, last = tile_heads(
            offset + i, n, ctx, depth, leaf_of, top, nodes, max_pages
        )
        leaves_chain = tl.load(diverge + leaf, mask=begins, other=0, cache_modifier=".cg")
        segments = path_segments(last, ctx, seg_tiles)
        count = tl.where(begins, 1 + segments, 0)
        at = base + tl.cumsum(count, 0) - count
        put_work(
            work_list, at, begins & (at < capacity), entry, start, ctx, node, stop, last, last, last + 1,
            leaf, leaf_depth, leaves_chain, 0,
        )  # fmt: skip
        for k in tl.range(0, tl.max(count) - 1):
            segment = tiles // seg_tiles + k
            # Tiles before this one hold only keys whose slots are their positions.
            in_place = tl.minimum((ctx + leaves_chain) // 64, last)
            first = segment * seg_tiles + tl.zeros_like(last)
            end = tl.minimum(first + seg_tiles, last)
            page_stop = tl.minimum(tl.maximum(in_place, first), end)
            short = tl.where(tiles % seg_tiles > 0, 1, 0)
            unit = 1 + blocks + segment - blocks * fold_segs + short
            put_work(
                work_list, at + 1 + k, begins & (k < segments) & (at + 1 + k < capacity), entry, start, ctx, node, stop,
                first, page_stop, tl.where(end > page_stop, end, 0), leaf, leaf_depth, leaves_chain, unit,
            )  # fmt: skip
        base += tl.sum(count)


@triton.jit(
    do_not_specialize=[
        "entry_start", "entry_ctx", "depth_ptr",
        "n_rows", "n_entries", "max_pages", "nodes", "kv_heads", "seg_tiles", "fold_segs", "coarse_from", "capacity",
        "slots",
    ]
)  # fmt: skip
def emit_work_kernel(
    entry_start, entry_ctx, depth_ptr, leaf_of_ptr, diverge_ptr, top_ptr, path_works, last_tile, work_list, header,
    n_rows, n_entries, max_pages, nodes, kv_heads, seg_tiles, fold_segs, coarse_from, capacity, slots,
    ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program per entry. Each works out what all of them come to, so none waits for another.

    A plan is coarse where blocks alone make ``coarse_from`` items, or where finer work finds no room. Which of both
    it is shows in no result.
    """
    entry = tl.program_id(0)
    e = tl.arange(0, ENTRIES)
    known = tl.minimum(e, n_entries - 1)
    starts, rows = entry_rows(entry_start, known, n_rows)
    rows = tl.where(e < n_entries, rows, 0)
    tiles = tl.where(rows > 0, entry_context(entry_ctx, known, max_pages) // 64, 0)
    row_tiles = tl.cdiv(rows, nodes)
    paths = tl.where(e < n_entries, tl.load(path_works + known), 0)
    last = tl.where(rows > 0, tl.load(last_tile + known), 0)
    block_tiles = seg_tiles * fold_segs
    fine_works = tl.sum(row_tiles * tl.cdiv(tiles, seg_tiles) + paths)
    fine_units = 2 + tl.max(tl.cdiv(last, seg_tiles))
    used_rows = tl.max(starts + rows)
    coarse = (fold_segs > 1) & (
        (tl.sum(row_tiles * (tiles // block_tiles)) * kv_heads >= coarse_from)
        | (used_rows.to(tl.int64) * fine_units > slots)
        | (fine_works > capacity)
    )
    blocks, stretches = committed_stretches(tiles, coarse, seg_tiles, fold_segs)
    works = row_tiles * stretches + paths
    units = 2 + tl.max(tl.cdiv(last, seg_tiles) - blocks * (fold_segs - 1))
    if entry == 0:
        tl.store(header, tl.minimum(tl.sum(works), capacity))
        tl.store(header + 1, units)
        tl.store(header + 2, coarse.to(tl.int32))
    base = tl.sum(tl.where(e < entry, works, 0))
    start, n = entry_rows(entry_start, entry, n_rows)
    if n > 0:
        ctx = entry_context(entry_ctx, entry, max_pages)
        # Paths come first: gathering is a chain of dependent loads, which the streaming of whole pages can hide only
        # while there is some left.
        emit_paths(
            work_list, base, capacity, entry, start, n, ctx, depth_ptr + start,
            leaf_of_ptr + start, diverge_ptr + start, top_ptr + start, nodes, max_pages,
            coarse, seg_tiles, fold_segs, LANES,
        )  # fmt: skip
        emit_committed(
            work_list, base + tl.sum(tl.where(e == entry, paths, 0)), capacity, entry, start, n, ctx, nodes,
            coarse, seg_tiles, fold_segs, LANES,
        )  # fmt: skip
