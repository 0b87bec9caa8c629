"""First kernel of the attention plan: the leaf paths of every entry."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.attention_plan_work import NEVER


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
def path_segments(last, ctx, seg_tiles):
    """How many segments of their path rows that end in tile ``last`` can not share with their entry."""
    committed = ctx // 64
    return tl.where(last > committed, tl.cdiv(last, seg_tiles) - committed // seg_tiles, 0)


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


@triton.jit(
    do_not_specialize=[
        "entry_start", "entry_ctx", "parent_ptr", "depth_ptr", "n_rows", "max_pages", "max_path", "nodes", "seg_tiles",
    ]
)  # fmt: skip
def scan_paths_kernel(
    entry_start, entry_ctx, parent_ptr, depth_ptr, leaf_of_ptr, has_child_ptr, diverge_ptr, top_ptr, path_ptr,
    path_works, last_tile, n_rows, max_pages, max_path, nodes, seg_tiles,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program per entry: leaf_of [rows]; diverge, top and path of leaves; work items of paths, largest last tile.

    Rows in these arrays are those of the entry, counted from its first. A path's list begins at its leaf and holds
    what lies off the entry's leading chain, where a row's slot is its position.
    """
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
        tl.debug_barrier()
        for base in tl.range(chain, n, ROWS):
            above = tl.load(parent + base + i, mask=base + i < n, other=-1)
            tl.store(has_child + above, 1, mask=(base + i < n) & (above >= anchor) & (above < base + i))
        tl.debug_barrier()
        for base in tl.range(anchor, n, ROWS):
            row = base + i
            childless = tl.load(has_child + row, mask=row < n, other=1, cache_modifier=".cg") == 0
            # Every lane stays on rows that exist: the walk reads where they stand.
            leaf = tl.where(childless, row, anchor)
            left = walk_up(leaf, childless & (row > anchor), anchor, parent, depth, leaf_of, path, max_path)
            tl.atomic_min(leaf_of + leaf, leaf, mask=childless & (row == anchor))
            tl.store(diverge + row, left, mask=childless)
        tl.debug_barrier()
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
        tl.debug_barrier()
        count, deepest = 0, 0
        for base in tl.range(0, n, ROWS):
            row = base + i
            begins, _, _, _, _, last = tile_heads(row, n, ctx, depth, leaf_of, top, nodes, max_pages)
            count += tl.sum(tl.where(begins, 1 + path_segments(last, ctx, seg_tiles), 0))
            deepest = tl.maximum(deepest, tl.max(tl.where(row < n, last, 0)))
        tl.store(path_works + entry, count)
        tl.store(last_tile + entry, deepest)
