# mypy: disallow-untyped-defs=False

"""Which draft nodes the target accepts: each tree is followed by the tokens sampled at its rows, in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, StepRows, await_previous, launch_options, specialised_on


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """All int32; entries B, longest accepted path M; -1 beyond a path's end."""

    counts: Tensor  # [B] rows of the path: 1 + accepted nodes, 0 for an entry without a tree
    rows: Tensor  # [B, M + 1] the path as rows of the entry, the root first
    emitted: Tensor  # [B, M + 1] the token sampled at each row of the path; -1 without a usable logit
    n_moves: Tensor  # [B] moves for `move_kv`
    move_source: Tensor  # [B, M] for `move_kv`
    move_target: Tensor  # [B, M] for `move_kv`
    for_host: Tensor  # counts, rows and emitted in one stretch, so that one copy brings them to the host

    @staticmethod
    def allocate(entries: int, max_depth: int, device: torch.device) -> AcceptResult:
        """Views of one buffer, filled with -1."""
        one, path, moves = (entries,), (entries, max_depth + 1), (entries, max_depth)
        shapes = (one, path, path, one, moves, moves)
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        counts, rows, emitted, n_moves, source, target = parts
        return AcceptResult(counts, rows, emitted, n_moves, source, target, flat[: sum(sizes[:3])])


MAX_NODES = 64  # of a tree and of a path, the root included
OPTIONS = {"num_warps": 1, "num_stages": 1}
_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _global_slot(page_table, entry, slot, mask, max_pages, n_pages):
    """page * 64 + lane of an entry's slot; -1 if the page does not exist."""
    listed = mask & (slot >= 0) & (slot < max_pages * 64)
    page = tl.load(page_table + entry.to(tl.int64) * max_pages + (slot >> 6), mask=listed, other=-1)
    return tl.where((page >= 0) & (page < n_pages), page * 64 + (slot & 63), -1)


@specialised_on()
def accept_kernel(
    entry_start, entry_ctx, root_row, parent, tokens, sampled, sample_start, page_table,
    counts, rows, emitted, n_moves, move_source, move_target,
    n_rows, n_samples, max_depth, max_pages, n_pages,
    NODES: tl.constexpr,
):  # fmt: skip
    """One program per entry. It holds the tree in registers; a step down the tree is one reduction over it."""
    await_previous()
    entry = tl.program_id(0)
    first = tl.load(entry_start + entry)
    last = tl.load(entry_start + entry + 1)
    size = last - first
    ctx = tl.load(entry_ctx + entry)
    root = tl.load(root_row + entry)
    samples = (first >= 0) & (first <= last) & (last <= n_rows) & (root >= 0) & (root < size)

    lane = tl.arange(0, NODES)  # a place in the tree, then in the path
    row = root + lane
    is_node = row < tl.where(samples, size, root)
    above = tl.load(parent + first + row, mask=is_node, other=-1)
    token = tl.load(tokens + first + row, mask=is_node, other=-1)
    at_sample = tl.load(sample_start + entry) + lane
    sampled_here = is_node & (at_sample >= 0) & (at_sample < n_samples)
    choices = tl.load(sampled + at_sample, mask=sampled_here, other=-1)
    # Row and choice in one word, so that one minimum finds the child and its sampled token.
    packed = (row.to(tl.int64) << 32) | (choices.to(tl.int64) & 0xFFFFFFFF)

    at = root
    choice = tl.where(samples, tl.sum(tl.where(lane == 0, choices, 0), axis=0), -1)
    count = samples.to(tl.int32)
    path = tl.where(lane < count, root, -1)
    taken = tl.where(lane < count, choice, -1)
    going = (choice >= 0) & (count <= max_depth)
    while going:
        child = is_node & (row > at) & (above == at) & (token == choice)
        best = tl.min(tl.where(child, packed, _NONE), axis=0)
        found = best != _NONE
        at = tl.where(found, (best >> 32).to(tl.int32), at)
        choice = tl.where(found, best.to(tl.int32), choice)
        place = tl.where(found, count, -1)
        path = tl.where(lane == place, at, path)
        taken = tl.where(lane == place, choice, taken)
        count += found.to(tl.int32)
        going = found & (choice >= 0) & (count <= max_depth)

    tl.store(counts + entry, count)
    kept = lane <= max_depth
    tl.store(rows + entry * (max_depth + 1) + lane, path, mask=kept)
    tl.store(emitted + entry * (max_depth + 1) + lane, taken, mask=kept)

    # One place per accepted row, so that it needs no compaction; those in place already read -1.
    accepted = (lane >= 1) & (lane < count)
    moved = accepted & (path != root + lane)
    source = _global_slot(page_table, entry, ctx + path, moved, max_pages, n_pages)
    target = _global_slot(page_table, entry, ctx + root + lane, moved, max_pages, n_pages)
    listed = (lane >= 1) & (lane <= max_depth)
    tl.store(move_source + entry * max_depth + lane - 1, source, mask=listed)
    tl.store(move_target + entry * max_depth + lane - 1, target, mask=listed)
    any_moved = tl.max(moved.to(tl.int32), axis=0)
    tl.store(n_moves + entry, any_moved * (count - 1))


def accept(
    step: StepRows,
    root_row: Tensor,
    tokens: Tensor,
    sampled: Tensor,
    sample_start: Tensor,
    result: AcceptResult,
    *,
    n_pages: int,
) -> None:
    """Accept down each entry's tree: from the root on, go to the child that holds the token sampled at the row.

    All int32. root_row: [entries], the row of the entry that is its tree's root; -1 for an entry without a tree (amid
    a prompt), which accepts nothing. tokens: [rows]. sampled: [samples], the target's token,
    -1 where no logit is usable; an entry's root has the one at sample_start: [entries], its nodes those behind it. Page
    ids of ``step`` are below ``n_pages``, which hold less than 2^31 slots. Rows past the root's first `MAX_NODES` are
    no nodes; a path has at most ``result.rows.shape[1] - 1`` of them, less than `MAX_NODES`. Of siblings with the same
    token the first counts.
    """
    entries, path = result.rows.shape
    accept_kernel[(entries,)](
        step.entry_start, step.entry_ctx, root_row, step.parent, tokens, sampled, sample_start, step.page_table,
        result.counts, result.rows, result.emitted, result.n_moves, result.move_source, result.move_target,
        step.parent.shape[0], sampled.shape[0], path - 1, step.page_table.shape[1], n_pages,
        NODES=MAX_NODES, **launch_options(OPTIONS, sampled.device),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """The kernel's only form."""
    return [CompileCase.of("accept", accept_kernel, {"NODES": MAX_NODES}, {"rows": "*i32"}, options=OPTIONS)]
