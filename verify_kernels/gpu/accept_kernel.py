"""The walk down each tree by the tokens sampled at its rows."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _global_slot(page_table, entry, slot, mask, max_pages, n_pages):
    """page * 64 + lane of an entry's slot; -1 where there is no such page."""
    listed = mask & (slot >= 0) & (slot < max_pages * 64)
    page = tl.load(page_table + entry.to(tl.int64) * max_pages + (slot >> 6), mask=listed, other=-1)
    return tl.where((page >= 0) & (page < n_pages), page * 64 + (slot & 63), -1)


@triton.jit(
    do_not_specialize=[
        "entry_start", "entry_ctx", "root_row", "parent", "tokens", "sampled", "sample_start", "page_table",
        "counts", "pending", "rows", "emitted", "next_ctx", "n_moves", "move_source", "move_target",
        "n_rows", "n_samples", "max_nodes", "max_depth", "max_pages", "n_pages",
    ]
)  # fmt: skip
def accept_kernel(
    entry_start, entry_ctx, root_row, parent, tokens, sampled, sample_start, page_table,
    counts, pending, rows, emitted, next_ctx, n_moves, move_source, move_target,
    n_rows, n_samples, max_nodes, max_depth, max_pages, n_pages,
    NODES: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    """One program per entry. It holds the tree in registers; a step of the walk is one reduction over it."""
    entry = tl.program_id(0)
    first = tl.load(entry_start + entry)
    last = tl.load(entry_start + entry + 1)
    size = last - first
    ctx = tl.load(entry_ctx + entry)
    root = tl.load(root_row + entry)
    samples = (first >= 0) & (first <= last) & (last <= n_rows) & (root >= 0) & (root < size)

    lane = tl.arange(0, NODES)
    row = root + lane
    is_node = row < tl.where(samples, root + tl.minimum(size - root, max_nodes), root)
    above = tl.load(parent + first + row, mask=is_node, other=-1)
    token = tl.load(tokens + first + row, mask=is_node, other=-1)
    if sample_start is None:
        at_sample = first + row
    else:
        at_sample = tl.load(sample_start + entry) + lane
    sampled_here = is_node & (at_sample >= 0) & (at_sample < n_samples)
    choices = tl.load(sampled + at_sample, mask=sampled_here, other=-1)
    # Row and choice in one word, so that one minimum finds the child and what was sampled there.
    packed = (row.to(tl.int64) << 32) | (choices.to(tl.int64) & 0xFFFFFFFF)

    step = tl.arange(0, WALK)
    at = root
    choice = tl.where(samples, tl.sum(tl.where(lane == 0, choices, 0), axis=0), -1)
    count = samples.to(tl.int32)
    walk = tl.where(step < count, root, -1)
    taken = tl.where(step < count, choice, -1)
    going = (choice >= 0) & (count <= max_depth)
    while going:
        child = is_node & (row > at) & (above == at) & (token == choice)
        best = tl.min(tl.where(child, packed, _NONE), axis=0)
        found = best != _NONE
        at = tl.where(found, (best >> 32).to(tl.int32), at)
        choice = tl.where(found, best.to(tl.int32), choice)
        place = tl.where(found, count, -1)
        walk = tl.where(step == place, at, walk)
        taken = tl.where(step == place, choice, taken)
        count += found.to(tl.int32)
        going = found & (choice >= 0) & (count <= max_depth)

    tl.store(counts + entry, count)
    tl.store(pending + entry, choice)
    tl.store(next_ctx + entry, ctx + tl.where(samples, root + count, size))
    kept = step <= max_depth
    tl.store(rows + entry * (max_depth + 1) + step, walk, mask=kept)
    tl.store(emitted + entry * (max_depth + 1) + step, taken, mask=kept)

    # One place per accepted row, so that it needs no compaction; those in place already read -1.
    accepted = (step >= 1) & (step < count)
    moved = accepted & (walk != root + step)
    source = _global_slot(page_table, entry, ctx + walk, moved, max_pages, n_pages)
    target = _global_slot(page_table, entry, ctx + root + step, moved, max_pages, n_pages)
    listed = (step >= 1) & (step <= max_depth)
    tl.store(move_source + entry * max_depth + step - 1, source, mask=listed)
    tl.store(move_target + entry * max_depth + step - 1, target, mask=listed)
    any_moved = tl.max(moved.to(tl.int32), axis=0)
    tl.store(n_moves + entry, any_moved * (count - 1))
