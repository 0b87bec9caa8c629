# mypy: disallow-untyped-defs=False

"""Plans tree attention for a step on the device: the tree's leaf paths, then the split-KV work items.

One entry with ctx = 300 filled slots and a tree of 7 nodes, of which rows 3, 4 and 6 are leaves::

    committed pages, shared by all rows    last page          the tree: row i lies at slot ctx + i
    +--------+--------+--------+--------+  +--------+
    | tile 0 | tile 1 | tile 2 | tile 3 |  | tile 4 |         0 -- 1 -- 2 -- 3      path of leaf 3: rows 0 1 2 3
    +--------+--------+--------+--------+  +--------+         |    |
    0                                 256        300 320      |    +--- 4           path of leaf 4: rows 0 1 4
                                                              |
    |---- a chunk: one segment of 4 ----|  |-- ... -|         +--- 5 -- 6           path of leaf 6: rows 0 5 6
                      |                        |
                      |                   gathered for each leaf path: the page's committed keys, then the path's
    read page by page, once               own, so that each key is in the lane of its position
    for a tile of rows                         |
                      |                        |
    work item: rows 0-6, tiles 0-3        work items: rows 0-3, row 4, rows 5-6, each with tile 4
                      |                        |
             partials, split 1            partials, split 0
                      |                        |
                      +-----------+------------+
                                  |
    combine, per row and head: segments fold into blocks, blocks are summed in order, split 0 comes last

A work item is a tile of rows times a chunk of keys; its partial softmax goes to one of its rows' KV splits. Split 0 is
a row's last tile, split 1 + i the i-th chunk of committed pages: a segment or, in coarse plans, a whole block folded in
registers, which gives the same bits as folding it later. Where rows of this step themselves fill tiles before their
last one, as in a prompt, these follow as segments of their leaf path, after the short chunk at the end of the committed
pages, which such rows make no use of: a path's segment begins at a multiple of its size and holds those pages too.

An entry's list begins with its paths. Gathering is a chain of dependent loads, which nothing would hide at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.attention_workspace import NEVER, SEGMENT_TILES, WORK_FIELDS, AttentionWorkspace
from verify_kernels.gpu.kernel_launch import (
    CompileCase,
    StepRows,
    await_previous,
    exchange,
    launch_options,
    specialised_on,
)


@triton.jit
def entry_rows(entry_start, entry, n_rows):
    """First row and row count of entries, held within the batch."""
    start = tl.minimum(tl.maximum(tl.load(entry_start + entry), 0), n_rows)
    stop = tl.minimum(tl.maximum(tl.load(entry_start + entry + 1), start), n_rows)
    return start, stop - start


@triton.jit
def entry_context(entry_ctx, entry, max_pages):
    """Filled slots of entries, held within the page table."""
    return tl.minimum(tl.maximum(tl.load(entry_ctx + entry), 0), max_pages * 64 - 1)


@triton.jit
def tile_heads(row, n, ctx, depth, leaf_of, top, nodes, max_pages):
    """Whether rows of an entry begin a tile of their path's rows; its leaf, nodes [first, stop) and last key tile.

    Depths are held within the entry: whatever they are, no path list is read outside.
    """
    leaf = tl.load(leaf_of + row, mask=row < n, other=n, cache_modifier=".cg")
    here = leaf < n
    leaf_depth = tl.minimum(tl.maximum(tl.load(depth + leaf, mask=here, other=0), 0), n - 1)
    node = tl.minimum(tl.maximum(tl.load(depth + row, mask=here, other=0), 0), leaf_depth)
    last = tl.minimum((ctx + node) // 64, max_pages - 1)
    group_first = tl.maximum(tl.load(top + leaf, mask=here, other=0, cache_modifier=".cg"), last * 64 - ctx)
    begins = here & ((node - group_first) % nodes == 0)
    stop = tl.minimum(tl.minimum(node + nodes, leaf_depth + 1), last * 64 + 64 - ctx)
    return begins, leaf, leaf_depth, node, stop, last


@triton.jit
def path_segments(last, ctx):
    """How many segments of their path rows that end in tile ``last`` cannot share with their entry."""
    committed = ctx // 64
    return tl.where(last > committed, tl.cdiv(last, SEGMENT_TILES) - committed // SEGMENT_TILES, 0)


@triton.jit
def leading_chain(parent, n, ROWS: tl.constexpr):
    """Rows of an entry up to the first whose parent is not the row before it; at least one."""
    i = tl.arange(0, ROWS)
    chain = n
    for base in tl.range(0, n, ROWS):
        row = base + i
        above = tl.load(parent + row, mask=row < n, other=0)
        chain = tl.minimum(chain, tl.min(tl.where((row < n) & (above != row - 1), row, n)))
    return tl.maximum(chain, 1)


@triton.jit
def walk_up(leaf, going, anchor, parent, depth, leaf_of, path, max_path):
    """From leaves [rows] up to the chain: notes each path and gives its nodes to their first leaf.

    Returns the depth at which each path leaves the chain.
    """
    node = leaf
    step = tl.zeros_like(leaf)
    branch_depth = tl.full(leaf.shape, NEVER, tl.int32)
    while tl.max(going.to(tl.int32)) > 0:
        tl.store(path + leaf.to(tl.int64) * max_path + step, node, mask=going & (step < max_path))
        tl.atomic_min(leaf_of + node, leaf, mask=going)  # of integers: any order gives the same
        branch_depth = tl.where(going, tl.load(depth + node, mask=going, other=0), branch_depth)
        above = tl.minimum(tl.load(parent + node, mask=going, other=0), node - 1)
        tl.atomic_min(leaf_of + anchor + tl.zeros_like(leaf), leaf, mask=going & (above == anchor))
        going = going & (above > anchor)
        node = tl.where(going, above, node)
        step += 1
    return branch_depth


@specialised_on("leaf_of_ptr", "has_child_ptr", "diverge_ptr", "top_ptr", "path_ptr", "path_works", "last_tile")
def scan_paths_kernel(
    entry_start, entry_ctx, parent_ptr, depth_ptr, leaf_of_ptr, has_child_ptr, diverge_ptr, top_ptr, path_ptr,
    path_works, last_tile, n_rows, max_pages, max_path, nodes, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per entry: leaf_of [rows]; diverge, top and path of leaves; work items of paths, largest last tile.

    Rows in these arrays are those of the entry, counted from its first. A path's list begins at its leaf and holds
    what lies off the entry's leading chain, where a row's slot is its position.
    """
    await_previous()
    entry = tl.program_id(0)
    start, n = entry_rows(entry_start, entry, n_rows)
    tl.store(path_works + entry, 0)
    tl.store(last_tile + entry, 0)
    if n > 0:
        ctx = entry_context(entry_ctx, entry, max_pages)
        parent, depth = parent_ptr + start, depth_ptr + start
        leaf_of, has_child = leaf_of_ptr + start, has_child_ptr + start
        diverge, top = diverge_ptr + start, top_ptr + start
        path = path_ptr + start.to(tl.int64) * max_path
        i = tl.arange(0, ROWS)
        chain = leading_chain(parent, n, ROWS)
        anchor = chain - 1
        for base in tl.range(anchor, n, ROWS):
            tl.store(leaf_of + base + i, n, mask=base + i < n)
            tl.store(has_child + base + i, 0, mask=base + i < n)
        exchange()
        for base in tl.range(chain, n, ROWS):
            above = tl.load(parent + base + i, mask=base + i < n, other=-1)
            tl.store(has_child + above, 1, mask=(base + i < n) & (above >= anchor) & (above < base + i))
        exchange()
        for base in tl.range(anchor, n, ROWS):
            row = base + i
            childless = tl.load(has_child + row, mask=row < n, other=1, cache_modifier=".cg") == 0
            # Every lane stays on rows that exist: the walk reads where they stand.
            leaf = tl.where(childless, row, anchor)
            left = walk_up(leaf, childless & (row > anchor), anchor, parent, depth, leaf_of, path, max_path)
            tl.atomic_min(leaf_of + leaf, leaf, mask=childless & (row == anchor))
            tl.store(diverge + row, left, mask=childless)
        exchange()
        chain_leaf = tl.minimum(tl.load(leaf_of + anchor, cache_modifier=".cg"), n - 1)
        tl.store(top + chain_leaf, 0)
        for base in tl.range(0, anchor, ROWS):
            tl.store(leaf_of + base + i, chain_leaf, mask=base + i < anchor)
        for base in tl.range(chain, n, ROWS):
            row = base + i
            above = tl.load(parent + row, mask=row < n, other=-1)
            own = tl.load(leaf_of + row, mask=row < n, other=-1, cache_modifier=".cg")
            known = (row < n) & (above >= anchor) & (above < row)
            over = tl.load(leaf_of + above, mask=known, other=-1, cache_modifier=".cg")
            first = tl.load(depth + row, mask=row < n, other=0)
            tl.store(top + own, first, mask=(row < n) & (own < n) & (own != over))
        exchange()
        count, deepest = 0, 0
        for base in tl.range(0, n, ROWS):
            row = base + i
            begins, _, _, _, _, last = tile_heads(row, n, ctx, depth, leaf_of, top, nodes, max_pages)
            count += tl.sum(tl.where(begins, 1 + path_segments(last, ctx), 0))
            deepest = tl.maximum(deepest, tl.max(tl.where(row < n, last, 0)))
        tl.store(path_works + entry, count)
        tl.store(last_tile + entry, deepest)


@triton.jit
def put_work(work_list, index, mask, fields):
    """Write one record per lane; ``fields``: those of a work item from ENTRY to SPLIT, in order."""
    work = work_list + index * WORK_FIELDS
    for i in tl.static_range(len(fields)):
        tl.store(work + i, fields[i], mask=mask)


@triton.jit
def committed_chunks(tiles, coarse, fold_segs):
    """Blocks and all chunks that ``tiles`` whole pages are read in: coarse plans read blocks as far as they go."""
    blocks = tl.where(coarse, tiles // (SEGMENT_TILES * fold_segs), 0)
    return blocks, blocks + tl.cdiv(tiles - blocks * SEGMENT_TILES * fold_segs, SEGMENT_TILES)


@triton.jit
def emit_committed(
    work_list, base, capacity, entry, start, n, ctx, nodes, coarse, fold_segs, LANES: tl.constexpr
):  # fmt: skip
    """Work on committed pages: all tiles of an entry's rows for the first chunk of keys, then for the next one."""
    i = tl.arange(0, LANES)
    tiles = ctx // 64
    blocks, chunks = committed_chunks(tiles, coarse, fold_segs)
    row_tiles = tl.cdiv(n, nodes)
    for offset in tl.range(0, row_tiles * chunks, LANES):
        at = offset + i
        chunk = at // row_tiles
        node = at % row_tiles * nodes
        whole = chunk < blocks
        first = tl.where(whole, chunk * fold_segs, chunk + blocks * (fold_segs - 1)) * SEGMENT_TILES
        stop = tl.minimum(first + tl.where(whole, fold_segs, 1) * SEGMENT_TILES, tiles)
        put_work(
            work_list, base + at, (at < row_tiles * chunks) & (base + at < capacity),
            (entry, start, ctx, node, tl.minimum(node + nodes, n), first, stop, 0, 0, 0, NEVER, 1 + chunk),
        )  # fmt: skip


@triton.jit
def emit_paths(
    work_list, base, capacity, entry, start, n, ctx, depth, leaf_of, diverge, top, nodes, max_pages,
    coarse, fold_segs, LANES: tl.constexpr,
):  # fmt: skip
    """Work on leaf paths: of every tile of their rows the last tile of keys, then segments that are not shared."""
    i = tl.arange(0, LANES)
    tiles = ctx // 64
    blocks, _ = committed_chunks(tiles, coarse, fold_segs)
    for offset in tl.range(0, n, LANES):
        begins, leaf, leaf_depth, node, stop, last = tile_heads(
            offset + i, n, ctx, depth, leaf_of, top, nodes, max_pages
        )
        leaves_chain = tl.load(diverge + leaf, mask=begins, other=0, cache_modifier=".cg")
        segments = path_segments(last, ctx)
        count = tl.where(begins, 1 + segments, 0)
        at = base + tl.cumsum(count, 0) - count
        put_work(
            work_list, at, begins & (at < capacity),
            (entry, start, ctx, node, stop, last, last, last + 1, leaf, leaf_depth, leaves_chain, 0),
        )  # fmt: skip
        for k in tl.range(0, tl.max(count) - 1):
            segment = tiles // SEGMENT_TILES + k
            # Tiles before this one hold only keys whose slots are their positions.
            in_place = tl.minimum((ctx + leaves_chain) // 64, last)
            first = segment * SEGMENT_TILES + tl.zeros_like(last)
            end = tl.minimum(first + SEGMENT_TILES, last)
            page_stop = tl.minimum(tl.maximum(in_place, first), end)
            short = tl.where(tiles % SEGMENT_TILES > 0, 1, 0)
            split = 1 + blocks + segment - blocks * fold_segs + short
            put_work(
                work_list, at + 1 + k, begins & (k < segments) & (at + 1 + k < capacity),
                (
                    entry, start, ctx, node, stop, first, page_stop, tl.where(end > page_stop, end, 0),
                    leaf, leaf_depth, leaves_chain, split,
                ),
            )  # fmt: skip
        base += tl.sum(count)


@specialised_on("leaf_of_ptr", "diverge_ptr", "top_ptr", "path_works", "last_tile", "work_list", "header")
def emit_work_kernel(
    entry_start, entry_ctx, depth_ptr, leaf_of_ptr, diverge_ptr, top_ptr, path_works, last_tile, work_list, header,
    n_rows, n_entries, max_pages, nodes, kv_heads, fold_segs, coarse_from, capacity, slots,
    ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program per entry. Each works out what all of them come to, so none waits for another.

    A plan is coarse where blocks alone make ``coarse_from`` items, or where finer work finds no room. Which of both
    it is shows in no result.
    """
    await_previous()
    entry = tl.program_id(0)
    e = tl.arange(0, ENTRIES)
    known = tl.minimum(e, n_entries - 1)
    starts, rows = entry_rows(entry_start, known, n_rows)
    rows = tl.where(e < n_entries, rows, 0)
    tiles = tl.where(rows > 0, entry_context(entry_ctx, known, max_pages) // 64, 0)
    row_tiles = tl.cdiv(rows, nodes)
    paths = tl.where(e < n_entries, tl.load(path_works + known), 0)
    last = tl.where(rows > 0, tl.load(last_tile + known), 0)
    block_tiles = SEGMENT_TILES * fold_segs
    fine_works = tl.sum(row_tiles * tl.cdiv(tiles, SEGMENT_TILES) + paths)
    fine_splits = 2 + tl.max(tl.cdiv(last, SEGMENT_TILES))
    used_rows = tl.max(starts + rows)
    coarse = (fold_segs > 1) & (
        (tl.sum(row_tiles * (tiles // block_tiles)) * kv_heads >= coarse_from)
        | (used_rows.to(tl.int64) * fine_splits > slots)
        | (fine_works > capacity)
    )
    blocks, chunks = committed_chunks(tiles, coarse, fold_segs)
    works = row_tiles * chunks + paths
    splits = 2 + tl.max(tl.cdiv(last, SEGMENT_TILES) - blocks * (fold_segs - 1))
    if entry == 0:
        tl.store(header, tl.minimum(tl.sum(works), capacity))
        tl.store(header + 1, splits)
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
            coarse, fold_segs, LANES,
        )  # fmt: skip
        emit_committed(
            work_list, base + tl.sum(tl.where(e == entry, paths, 0)), capacity, entry, start, n, ctx, nodes,
            coarse, fold_segs, LANES,
        )  # fmt: skip


SCAN_ROWS = 128
EMIT_LANES = 128
OPTIONS = {"num_warps": 4, "num_stages": 1}
ENTRY_BLOCKS = (16, 64, 256)


def attention_plan(step: StepRows, workspace: AttentionWorkspace) -> None:
    """Fill the workspace's plan. Two launches, once per step, for all layers.

    Rows of an entry are a chain, then a tree above it. A tree's paths leave the chain for at most
    ``workspace.max_branch`` nodes: longer ones are computed wrongly, as values on the device cannot be refused, but
    nothing is read out of bounds. Rows and entries, at least one each, are as many as the workspace takes or fewer.
    """
    (entries,), (rows,) = step.entry_ctx.shape, step.depth.shape
    tile = workspace.tile(rows, entries)
    nodes = tile.block_m // workspace.group
    ws, options = workspace, launch_options(OPTIONS, workspace.chip)
    scan_paths_kernel[(entries,)](
        step.entry_start, step.entry_ctx, step.parent, step.depth, ws.leaf_of, ws.has_child, ws.diverge, ws.top,
        ws.path, ws.path_works, ws.last_tile, rows, ws.max_pages, ws.max_branch, nodes, ROWS=SCAN_ROWS, **options,
    )  # fmt: skip
    emit_work_kernel[(entries,)](
        step.entry_start, step.entry_ctx, step.depth, ws.leaf_of, ws.diverge, ws.top, ws.path_works, ws.last_tile,
        ws.work, ws.header, rows, entries, ws.max_pages, nodes, ws.kv_heads, tile.fold_segs,
        ws.coarse_from(rows, entries), ws.work.shape[0], ws.slots,
        ENTRIES=_entry_block(entries), LANES=EMIT_LANES, **options,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Path scan, and work lists for every block of entries."""
    scan = CompileCase.of("scan_paths", scan_paths_kernel, {"ROWS": SCAN_ROWS}, options=OPTIONS)
    return [scan] + [
        CompileCase.of(
            f"emit_work {entries} entries", emit_work_kernel, {"ENTRIES": entries, "LANES": EMIT_LANES}, options=OPTIONS
        )
        for entries in ENTRY_BLOCKS
    ]


def _entry_block(entries: int) -> int:
    """A block of few sizes, so that few kernels are compiled."""
    return next((block for block in ENTRY_BLOCKS if entries <= block), triton.next_power_of_2(entries))
