"""Tree attention over a paged KV cache: trees, prefill chunks and plain decode in one pass, bitwise as plain decode."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from verify_kernels.gpu.argument_checks import INDEX, check_rank, check_tensor
from verify_kernels.gpu.attention_plan import check_step
from verify_kernels.gpu.attention_tiles import CHIPS, FP8, HEAD_DIMS, TILE, AttentionTile, attention_tile
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.tree_attention_combine_kernel import tree_attention_combine_kernel
from verify_kernels.gpu.tree_attention_kernel import tree_attention_kernel

COMBINE_BLOCKS = 8  # blocks of keys summed at a time: part of what a result's bits depend on
COMBINE_WARPS = 4
# A product and a sum are fused where the source says so, nowhere else: two loops must round alike.
EXACT = {"enable_fp_fusion": False}
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8e4nv"}


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    workspace: AttentionWorkspace,
    *,
    entry_of: Tensor,
    entry_start: Tensor,
    entry_ctx: Tensor,
    depth: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """out = attention of every row to the keys at positions 0 .. its own, on its own path. Two launches.

    q: [rows, heads, head_dim]; rows may be apart, so a view of qkv works. k_pool, v_pool: one layer's [pages,
    kv_heads, 64, head_dim], into which K and V of the rows are written already; of q's dtype, or float8 e4m3 for q of
    two bytes, with k_scale, v_scale: float32 [kv_heads], key = stored * scale; products are float16 then. out: [rows,
    heads, head_dim], q's dtype. entry_of, depth: int32 [rows]; entry_start: int32 [entries + 1]; entry_ctx: int32
    [entries]; page_table: int32 [entries, max_pages]. scale: of the scores, above 0. window: a row at position p sees
    keys at positions > p - window; 0: all. workspace: holds this step's plan, made by `attention_plan` for the same
    arrays.

    Every row gets the bits that decoding its path token by token gives it, see
    `verify_kernels.gpu.attention_plan_work`. Masks need no ancestor words: rows are grouped by leaf path, on which a
    mask is a comparison of positions, for trees of any size. Padding rows are left alone.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, scales are not given as asked, scale or window is out
            of range, or the workspace is of another model or too small.
    """
    rows, entries = check_step(entry_start, entry_ctx, depth, workspace)
    _check_step_arrays(rows, entries, workspace, entry_of, page_table)
    _check_tensors(rows, q, k_pool, v_pool, out, workspace)
    _check_scales(workspace, k_scale, v_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: {scale}; must be above 0 and finite")
    if not 0 <= window < 2**30:
        raise ValueError(f"window: {window}; must be 0 (all keys) up to 2^30")
    ws, windowed = workspace, window > 0
    tile = ws.tile(rows, entries, windowed=windowed)
    block = triton.next_power_of_2(ws.head_dim)
    items = ws.work.shape[0] * ws.kv_heads
    base_2 = scale * math.log2(math.e)
    tree_attention_kernel[(min(items, ws.processors * tile.resident),)](
        q, k_pool, v_pool, k_scale, page_table, depth, ws.path, ws.work, ws.header, ws.partials, ws.peaks,
        base_2, q.stride(0), window, rows, ws.heads, ws.kv_heads, ws.group, page_table.shape[1], k_pool.shape[0],
        ws.max_branch, HEAD_DIM=ws.head_dim, DIM_BLOCK=block, WINDOWED=windowed, SCALED=k_scale is not None,
        **_tile_constants(tile), **_tile_options(tile),
    )  # fmt: skip
    tree_attention_combine_kernel[(rows, ws.heads)](
        ws.partials, ws.peaks, out, entry_of, entry_start, entry_ctx, depth, ws.header, k_scale, v_scale,
        base_2, window, entries, ws.heads, ws.group,
        HEAD_DIM=ws.head_dim, DIM_BLOCK=block, BLOCKS=COMBINE_BLOCKS, SEG_TILES=tile.seg_tiles,
        FOLD_SEGS=tile.fold_segs, SCALED=k_scale is not None, num_warps=COMBINE_WARPS, num_stages=1, **EXACT,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every head size, KV type and tile of every chip, with and without a window."""
    kinds = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv")]
    cases = []
    for chip in CHIPS:
        for head_dim in HEAD_DIMS:
            for q_type, kv_type in kinds if head_dim in (64, 128, 256) else kinds[:1]:
                for windowed in (False, True) if head_dim in (64, 128, 256) else (False,):
                    kv_dtype = next(dtype for dtype, name in TYPES.items() if name == kv_type)
                    tiles = {attention_tile(chip, head_dim, kv_dtype, windowed=windowed, wide=w) for w in (False, True)}
                    cases += [
                        _attention_case(chip, head_dim, q_type, kv_type, windowed, tile)
                        for tile in sorted(tiles, key=lambda tile: tile.block_m)
                    ]
    folds = {(d, attention_tile(chip, d, torch.bfloat16).fold_segs) for chip in CHIPS for d in HEAD_DIMS}
    return cases + [
        _combine_case(head_dim, fold_segs, q_type, scaled)
        for head_dim, fold_segs in sorted(folds)
        for q_type in ("bf16", "fp16")
        for scaled in (False, True)
    ]


def _tile_constants(tile: AttentionTile) -> dict[str, int | bool]:
    return {
        "BLOCK_M": tile.block_m,
        "LANES": tile.lanes,
        "SEG_TILES": tile.seg_tiles,
        "FOLDS": tile.fold_segs > 1,
        "STAGES": tile.stages,
    }


def _tile_options(tile: AttentionTile) -> dict[str, int | bool]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **EXACT}


def _attention_case(
    chip: str, head_dim: int, q_type: str, kv_type: str, windowed: bool, tile: AttentionTile
) -> CompileCase:
    scaled = kv_type == "fp8e4nv"
    floats = ("partials", "peaks") + (("k_scale",) if scaled else ())
    integers = ("page_table", "depth_ptr", "path", "work_list", "header")
    numbers = ("q_stride", "window", "n_rows", "n_heads", "n_kv", "group", "max_pages", "n_pages", "max_path")
    signature = {"q_ptr": f"*{q_type}", "k_ptr": f"*{kv_type}", "v_ptr": f"*{kv_type}", "scale": "fp32"}
    signature |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "*i32") | dict.fromkeys(numbers, "i32")
    shape = {"HEAD_DIM": head_dim, "DIM_BLOCK": triton.next_power_of_2(head_dim)}
    kinds = {"WINDOWED": windowed, "SCALED": scaled} | ({} if scaled else {"k_scale": None})
    rows = "fp16 over " if scaled and q_type == "fp16" else ""
    return CompileCase(
        name=f"attend {chip} {head_dim} {rows}{kv_type} tile {tile.block_m}{' window' if windowed else ''}",
        kernel=tree_attention_kernel,
        signature=signature,
        constexprs={**shape, **kinds, **_tile_constants(tile)},
        divisible=("q_ptr", "k_ptr", "v_ptr", "partials", "peaks", "path", "work_list", "header", "q_stride"),
        options=_tile_options(tile),
        targets=(chip,),
        resident=tile.resident,
    )


def _combine_case(head_dim: int, fold_segs: int, q_type: str, scaled: bool) -> CompileCase:
    scales = ("k_scale", "v_scale")
    tensors = ("entry_of", "entry_start", "entry_ctx", "depth", "header")
    signature = dict.fromkeys(("partials", "peaks"), "*fp32") | {"out": f"*{q_type}", "scale": "fp32"}
    signature |= dict.fromkeys(tensors, "*i32") | dict.fromkeys(("window", "n_entries", "n_heads", "group"), "i32")
    signature |= dict.fromkeys(scales, "*fp32") if scaled else {}
    shape = {"HEAD_DIM": head_dim, "DIM_BLOCK": triton.next_power_of_2(head_dim), "BLOCKS": COMBINE_BLOCKS}
    cut = {"SEG_TILES": attention_tile(CHIPS[0], head_dim, torch.bfloat16).seg_tiles, "FOLD_SEGS": fold_segs}
    kinds = {"SCALED": scaled} | ({} if scaled else dict.fromkeys(scales))
    return CompileCase(
        name=f"combine {head_dim} by {fold_segs} {q_type}{' scales' if scaled else ''}",
        kernel=tree_attention_combine_kernel,
        signature=signature,
        constexprs={**shape, **cut, **kinds},
        divisible=("partials", "peaks", "out", "header"),
        options={"num_warps": COMBINE_WARPS, "num_stages": 1, **EXACT},
        targets=tuple(c for c in CHIPS if attention_tile(c, head_dim, torch.bfloat16).fold_segs == fold_segs),
    )


def _check_step_arrays(
    rows: int, entries: int, workspace: AttentionWorkspace, entry_of: Tensor, page_table: Tensor
) -> None:
    device = workspace.header.device
    check_tensor("entry_of", entry_of, (rows,), INDEX, device)
    check_rank("page_table", page_table, 2)
    pages = page_table.shape[1]
    if not 1 <= pages <= workspace.max_pages:
        raise ValueError(f"page_table: {pages} pages per entry; the workspace takes 1 to {workspace.max_pages}")
    check_tensor("page_table", page_table, (entries, pages), INDEX, device)


def _check_tensors(
    rows: int, q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, workspace: AttentionWorkspace
) -> None:
    ws, device = workspace, workspace.header.device
    check_rank("k_pool", k_pool, 4)
    if k_pool.shape[0] == 0:
        raise ValueError("k_pool: has no pages; must have at least one")
    check_tensor("k_pool", k_pool, (k_pool.shape[0], ws.kv_heads, TILE, ws.head_dim), (ws.kv_dtype,), device)
    check_tensor("v_pool", v_pool, k_pool.shape, (ws.kv_dtype,), device)
    if tuple(q.shape) != (rows, ws.heads, ws.head_dim):
        raise ValueError(f"q: has shape {tuple(q.shape)}; must be {(rows, ws.heads, ws.head_dim)}")
    types = (ws.kv_dtype,) if ws.kv_dtype != FP8 else (torch.float16, torch.bfloat16)
    if q.dtype not in types or q.device != device:
        raise ValueError(f"q: is {q.dtype} on {q.device}; must be one of {', '.join(map(str, types))} on {device}")
    if q.stride()[1:] != (ws.head_dim, 1) or q.stride(0) % 16 or q.data_ptr() % 16:
        raise ValueError(f"q: has strides {q.stride()}; heads must lie side by side, rows at multiples of 16 values")
    check_tensor("out", out, q.shape, (q.dtype,), device)


def _check_scales(workspace: AttentionWorkspace, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scale is not None) != (workspace.kv_dtype == FP8):
            raise ValueError(f"{name}: goes with float8 pools and only with them; they are {workspace.kv_dtype}")
        if scale is not None:
            check_tensor(name, scale, (workspace.kv_heads,), (torch.float32,), workspace.header.device)
