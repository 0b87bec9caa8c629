"""Plans tree attention for a step, on the device: leaf paths, and which keys are read for which rows."""

from __future__ import annotations

import triton
from torch import Tensor

from verify_kernels.gpu.argument_checks import INDEX, check_rank, check_tensor
from verify_kernels.gpu.attention_plan_emit_kernel import emit_work_kernel
from verify_kernels.gpu.attention_plan_kernel import scan_paths_kernel
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.compile_case import CompileCase

SCAN_ROWS = 128
EMIT_LANES = 128
WARPS = 4
ENTRY_BLOCKS = (16, 64, 256)


def attention_plan(
    entry_start: Tensor, entry_ctx: Tensor, parent: Tensor, depth: Tensor, workspace: AttentionWorkspace
) -> None:
    """Fill the workspace's plan. Two launches, once per step, for all layers.

    entry_start: int32 [entries + 1], first row of each entry; rows from the last of these on are padding. entry_ctx:
    int32 [entries], slots that are filled; row i of an entry lies at slot ctx + i. parent: int32 [rows], row of the
    same entry, -1 for its first. depth: int32 [rows], so that a row's position is ctx + depth. Rows of an entry are a
    chain, then a tree above it; a tree's paths leave the chain for at most ``workspace.max_branch`` nodes (longer ones
    are computed wrongly, as values on the device can not be refused; nothing is read out of bounds).

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or there is no room in the workspace.
    """
    rows, entries = check_step(entry_start, entry_ctx, depth, workspace)
    check_tensor("parent", parent, (rows,), INDEX, workspace.header.device)
    tile = workspace.tile(rows, entries)
    nodes = tile.block_m // workspace.group
    ws = workspace
    scan_paths_kernel[(entries,)](
        entry_start, entry_ctx, parent, depth, ws.leaf_of, ws.has_child, ws.diverge, ws.top, ws.path,
        ws.path_works, ws.last_tile, rows, ws.max_pages, ws.max_branch, nodes, tile.seg_tiles,
        ROWS=SCAN_ROWS, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    emit_work_kernel[(entries,)](
        entry_start, entry_ctx, depth, ws.leaf_of, ws.diverge, ws.top, ws.path_works, ws.last_tile, ws.work, ws.header,
        rows, entries, ws.max_pages, nodes, ws.kv_heads, tile.seg_tiles, tile.fold_segs,
        ws.coarse_from(rows, entries), ws.work.shape[0], ws.slots,
        ENTRIES=_entry_block(entries), LANES=EMIT_LANES, num_warps=WARPS, num_stages=1,
    )  # fmt: skip


def check_step(entry_start: Tensor, entry_ctx: Tensor, depth: Tensor, workspace: AttentionWorkspace) -> tuple[int, int]:
    """Rows and entries of a step, once its arrays are found in order and the workspace large enough.

    Raises:
        ValueError: they are not, or it is not.
    """
    check_rank("entry_ctx", entry_ctx, 1)
    check_rank("depth", depth, 1)
    (entries,), (rows,), device = entry_ctx.shape, depth.shape, workspace.header.device
    if not 1 <= entries <= workspace.max_entries:
        raise ValueError(f"entry_ctx: {entries} entries; the workspace takes 1 to {workspace.max_entries}")
    if not 1 <= rows <= workspace.max_rows:
        raise ValueError(f"depth: {rows} rows; the workspace takes 1 to {workspace.max_rows}")
    check_tensor("entry_start", entry_start, (entries + 1,), INDEX, device)
    check_tensor("entry_ctx", entry_ctx, (entries,), INDEX, device)
    check_tensor("depth", depth, (rows,), INDEX, device)
    return rows, entries


def compile_cases() -> list[CompileCase]:
    """Path scan, and work lists for every block of entries."""
    step = ("entry_start", "entry_ctx")
    lists = ("leaf_of_ptr", "diverge_ptr", "top_ptr", "path_works", "last_tile")
    numbers = ("n_rows", "max_pages", "nodes", "seg_tiles")
    pointers = (*step, "parent_ptr", "depth_ptr", *lists, "has_child_ptr", "path_ptr")
    scan = CompileCase(
        name="scan_paths",
        kernel=scan_paths_kernel,
        signature=dict.fromkeys(pointers, "*i32") | dict.fromkeys((*numbers, "max_path"), "i32"),
        constexprs={"ROWS": SCAN_ROWS},
        divisible=(*lists, "has_child_ptr", "path_ptr"),
        options={"num_warps": WARPS, "num_stages": 1},
    )
    emitted = (*step, "depth_ptr", *lists, "work_list", "header")
    more = ("n_entries", "kv_heads", "fold_segs", "coarse_from", "capacity", "slots")
    return [scan] + [
        CompileCase(
            name=f"emit_work {entries} entries",
            kernel=emit_work_kernel,
            signature=dict.fromkeys(emitted, "*i32") | dict.fromkeys((*numbers, *more), "i32"),
            constexprs={"ENTRIES": entries, "LANES": EMIT_LANES},
            divisible=(*lists, "work_list", "header"),
            options={"num_warps": WARPS, "num_stages": 1},
        )
        for entries in ENTRY_BLOCKS
    ]


def _entry_block(entries: int) -> int:
    """A block of few sizes, so that few kernels are compiled."""
    return next((block for block in ENTRY_BLOCKS if entries <= block), triton.next_power_of_2(entries))
