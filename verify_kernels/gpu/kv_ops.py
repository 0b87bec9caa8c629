# mypy: disallow-untyped-defs=False

"""What goes into the KV pool: q/k norm, rotary embedding and write of new rows; the move of accepted ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.attention_workspace import HEAD_DIMS
from verify_kernels.gpu.kernel_launch import (
    FP8_LARGEST,
    CompileCase,
    StepRows,
    await_previous,
    exchange,
    launch_options,
    specialised_on,
)

_LARGEST = tl.constexpr(FP8_LARGEST)


@triton.jit
def _store_kv(pool, at, mask, values):
    if pool.dtype.element_ty == tl.float8e4nv:
        # e4m3 has no infinity: overflow must stay a number, and NaN must stay NaN.
        values = tl.where(values == values, tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST), values)
    tl.store(pool + at, values.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _rms_inverse(a, b, eps, HEAD_DIM: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]


@specialised_on("qkv", "q_out", "k_pool", "v_pool", "cos", "sin", "q_norm", "k_norm", "q_stride")
def write_kv_kernel(
    qkv, q_out, k_pool, v_pool, cos, sin, q_norm, k_norm,
    entry_of, entry_start, entry_ctx, depth, page_table,
    q_stride, n_heads, n_kv, n_entries, max_pages, n_pages, n_positions, eps,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, HEADS heads of its q, k and v). A head's halves are two tiles: to rotate is to mix these."""
    row = tl.program_id(0)
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    col = tl.arange(0, HALF_BLOCK)[None, :]
    is_q, is_v = head < n_heads, head >= n_heads + n_kv
    inside = (col < HALF) & (head < n_heads + 2 * n_kv)
    source = qkv + (row.to(tl.int64) * (n_heads + 2 * n_kv) + head) * HEAD_DIM + col
    entry = tl.load(entry_of + row)
    known = (entry >= 0) & (entry < n_entries)
    below = tl.load(depth + row)
    first = tl.load(entry_start + entry, mask=known, other=0)
    last = tl.load(entry_start + entry + 1, mask=known, other=0)
    ctx = tl.load(entry_ctx + entry, mask=known, other=0)
    live = known & (row >= first) & (row < last)
    slot = ctx + row - first
    listed = live & (slot >= 0) & (slot < max_pages * 64)
    page = tl.load(page_table + entry.to(tl.int64) * max_pages + (slot >> 6), mask=listed, other=-1)
    position = tl.minimum(tl.maximum(ctx + below, 0), n_positions - 1)
    turn = position.to(tl.int64) * HALF + col
    c = tl.load(cos + turn, mask=inside, other=0.0)
    s = tl.load(sin + turn, mask=inside, other=0.0)

    if q_norm is not None:
        q_col, k_col = inside & is_q, inside & (head >= n_heads)
        w_a = tl.load(q_norm + col, mask=q_col, other=0.0) + tl.load(k_norm + col, mask=k_col, other=0.0)
        w_b = tl.load(q_norm + HALF + col, mask=q_col, other=0.0) + tl.load(k_norm + HALF + col, mask=k_col, other=0.0)

    await_previous()
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    x, y = a, b
    if q_norm is not None:
        inverse = _rms_inverse(a, b, eps, HEAD_DIM)
        x, y = a * inverse * w_a.to(tl.float32), b * inverse * w_b.to(tl.float32)
    x, y = tl.where(is_v, a, x * c - y * s), tl.where(is_v, b, y * c + x * s)

    q_mask = (col < HALF) & (head < tl.where(live, n_heads, 0))
    q_at = q_out + row.to(tl.int64) * q_stride + head * HEAD_DIM + col
    tl.store(q_at, x.to(q_out.dtype.element_ty), mask=q_mask)
    tl.store(q_at + HALF, y.to(q_out.dtype.element_ty), mask=q_mask)
    in_page = page.to(tl.int64) * n_kv * 64 * HEAD_DIM + (slot & 63) * HEAD_DIM + col
    k_head, v_head = head - n_heads, head - n_heads - n_kv
    k_at, v_at = in_page + k_head * 64 * HEAD_DIM, in_page + v_head * 64 * HEAD_DIM
    written = tl.where((page >= 0) & (page < n_pages), n_kv, 0)
    k_mask = (col < HALF) & (k_head >= 0) & (k_head < written)
    v_mask = (col < HALF) & (v_head >= 0) & (v_head < written)
    _store_kv(k_pool, k_at, k_mask, x)
    _store_kv(k_pool, k_at + HALF, k_mask, y)
    _store_kv(v_pool, v_at, v_mask, x)
    _store_kv(v_pool, v_at + HALF, v_mask, y)


@triton.jit
def _slot_words(slot, layer, head, n_kv, n_pages, WORDS: tl.constexpr):
    """Where a slot's words begin in a pool [layers, pages, n_kv, 64, WORDS]."""
    page = layer.to(tl.int64) * n_pages + (slot >> 6)
    return ((page * n_kv + head) * 64 + (slot & 63)) * WORDS


@specialised_on("k_pool", "v_pool")
def move_kv_kernel(
    k_pool, v_pool, source, target, n_moves, max_moves, n_kv, n_pages,
    WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (entry, layer, kv head): all of an entry's moves, CHUNK at a time, of K and V as 32-bit words."""
    await_previous()
    entry, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    moves = tl.minimum(tl.load(n_moves + entry), max_moves)
    word = tl.arange(0, WORDS_BLOCK)[None, :]
    for start in range(0, moves, CHUNK):
        index = start + tl.arange(0, CHUNK)[:, None]
        listed = index < moves
        at = entry.to(tl.int64) * max_moves + index
        a = tl.load(source + at, mask=listed, other=-1)
        b = tl.load(target + at, mask=listed, other=-1)
        real = (a >= 0) & (b >= 0) & (a < n_pages * 64) & (b < n_pages * 64) & (a != b)
        mask = real & (word < WORDS)
        taken = _slot_words(a, layer, head, n_kv, n_pages, WORDS) + word
        given = _slot_words(b, layer, head, n_kv, n_pages, WORDS) + word
        k = tl.load(k_pool + taken, mask=mask, other=0)
        v = tl.load(v_pool + taken, mask=mask, other=0)
        # Another thread's row may lie where this one's goes: all must be read before any is written. Chunks need no
        # such care, as no move's target is the source of a later one.
        exchange()
        tl.store(k_pool + given, k, mask=mask)
        tl.store(v_pool + given, v, mask=mask)


WRITE_TILE = 256  # values of half a head that one warp holds: one 16-byte load per thread in two-byte types
WRITE_OPTIONS = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
MOVE_CHUNK = 8  # moves that one warp holds at a time; few accepted paths are longer
MOVE_OPTIONS = {"num_warps": 1, "num_stages": 1}


def write_kv(
    qkv: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cos: Tensor,
    sin: Tensor,
    step: StepRows,
    *,
    eps: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> None:
    """q_out = rotated q; K and V of row i of an entry go to its slot ctx + i. One launch.

    qkv: [rows, (heads + 2 kv_heads) head_dim] = [q | k | v], float32, float16 or bfloat16. q_out: [rows, heads,
    head_dim] of such a type; rows may be apart, so a view of ``qkv`` works in place. k_pool, v_pool: one layer's
    [pages, kv_heads, 64, head_dim], of such a type or float8 e4m3, whose values are held within +-448. cos, sin:
    float32 [positions, head_dim / 2]; the half-split convention. q_norm, k_norm: [head_dim], both or none: RMSNorm of
    each head before it is rotated.

    ``step``, cos, sin and norms are read before the kernel waits (`await_only`): the launch just before must not write
    them. Padding, and a row outside the rows of its entry, is left alone; a row whose slot has no page is not written.
    All arithmetic is float32 and of the row alone.
    """
    rows, heads, head_dim = q_out.shape
    entries, max_pages = step.page_table.shape
    kv_heads = k_pool.shape[1]
    half_block, tile_heads = _write_tile(head_dim)
    write_kv_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, tile_heads))](
        qkv, q_out, k_pool, v_pool, cos, sin, q_norm, k_norm,
        step.entry_of, step.entry_start, step.entry_ctx, step.depth, step.page_table,
        q_out.stride(0), heads, kv_heads, entries, max_pages, k_pool.shape[0], cos.shape[0], eps,
        HEAD_DIM=head_dim, HEADS=tile_heads, HALF_BLOCK=half_block,
        **launch_options(WRITE_OPTIONS, qkv.device),
    )  # fmt: skip


def move_kv(k_pool: Tensor, v_pool: Tensor, source: Tensor, target: Tensor, n_moves: Tensor) -> None:
    """Copy KV of slots ``source`` to slots ``target`` in all layers. One launch.

    k_pool, v_pool: [layers, pages, kv_heads, 64, head_dim] of less than 2^31 slots, of a type of 1 to 4 bytes; a row
    is a multiple of 4 bytes. source, target: int32 [entries, max_moves], slots of the pool (page * 64 + lane), of which
    an entry's first ``n_moves`` (int32 [entries]) are looked at; a pair with a slot that is none, or with two equal
    ones, is passed over.

    Within an entry a move's target is no later move's source, as along an accepted path, where targets ascend and
    never overtake sources; then it is as if moves were made one after the other. Entries share no slots.
    """
    if source.numel() == 0 or k_pool.numel() == 0:
        return
    layers, pages, kv_heads, _, head_dim = k_pool.shape
    words = head_dim * k_pool.element_size() // 4
    move_kv_kernel[(source.shape[0], layers, kv_heads)](
        k_pool.view(torch.int32), v_pool.view(torch.int32), source, target, n_moves, source.shape[1], kv_heads, pages,
        **_move_tile(words), **launch_options(MOVE_OPTIONS, source.device),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Writes of every head size and pool type, with and without norms; moves of every row width."""
    writes = [
        _write_case(head_dim, rows, pool, norms)
        for head_dim in HEAD_DIMS
        for rows, pool in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv"))
        for norms in (False, True)
    ]
    widths = sorted({head_dim * size // 4 for head_dim in HEAD_DIMS for size in (1, 2)})
    return writes + [_move_case(words) for words in widths]


def _write_case(head_dim: int, rows: str, pool: str, norms: bool) -> CompileCase:
    half_block, tile_heads = _write_tile(head_dim)
    constants = {"HEAD_DIM": head_dim, "HEADS": tile_heads, "HALF_BLOCK": half_block}
    types = dict.fromkeys(("qkv", "q_out"), f"*{rows}") | dict.fromkeys(("k_pool", "v_pool"), f"*{pool}")
    names = ("q_norm", "k_norm")
    return CompileCase.of(
        f"write_kv {head_dim} {rows} {pool}{' norms' if norms else ''}",
        write_kv_kernel,
        constants if norms else {**constants, **dict.fromkeys(names)},
        types | dict.fromkeys(names, f"*{rows}"),
        divisible=("q_stride",),
        options=WRITE_OPTIONS,
    )


def _move_case(words: int) -> CompileCase:
    types = dict.fromkeys(("k_pool", "v_pool"), "*i32")
    return CompileCase.of(f"move_kv {words} words", move_kv_kernel, _move_tile(words), types, options=MOVE_OPTIONS)


def _write_tile(head_dim: int) -> tuple[int, int]:
    """Columns of a half head's tile, and heads to a tile; the layout of a head's sum depends on head_dim alone."""
    half_block = triton.next_power_of_2(head_dim // 2)
    return half_block, max(1, WRITE_TILE // half_block)


def _move_tile(words: int) -> dict[str, int]:
    return {"WORDS": words, "WORDS_BLOCK": triton.next_power_of_2(words), "CHUNK": MOVE_CHUNK}
