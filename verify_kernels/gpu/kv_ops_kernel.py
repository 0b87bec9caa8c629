"""What goes into the KV pool: new rows, normed, rotated and written; accepted rows, moved to where they belong."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_kv(pool, at, mask, values, scale, head):
    if scale is not None:
        values = tl.div_rn(values, tl.load(scale + head, mask=mask, other=1.0))
        # e4m3 has no infinity: what is too large must stay a number, what is none must stay none.
        values = tl.where(values == values, tl.minimum(tl.maximum(values, -448.0), 448.0), values)
    tl.store(pool + at, values.to(pool.dtype.element_ty), mask=mask)


@triton.jit
def _rms_inverse(a, b, eps, HEAD_DIM: tl.constexpr):
    return tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]


@triton.jit(
    do_not_specialize=[
        "k_scale", "v_scale", "entry_of", "entry_start", "entry_ctx", "depth", "page_table",
        "n_heads", "n_kv", "n_entries", "max_pages", "n_pages", "n_positions",
    ]
)  # fmt: skip
def write_kv_kernel(
    qkv, q_out, k_pool, v_pool, cos, sin, q_norm, k_norm, k_scale, v_scale,
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
    # Loads ask only whether there is such a value, not whose it is: so they need not wait for the row's entry.
    inside = (col < HALF) & (head < n_heads + 2 * n_kv)
    source = qkv + (row.to(tl.int64) * (n_heads + 2 * n_kv) + head) * HEAD_DIM + col
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

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

    x, y = a, b
    if q_norm is not None:
        q_col, k_col = inside & is_q, inside & (head >= n_heads)
        w_a = tl.load(q_norm + col, mask=q_col, other=0.0) + tl.load(k_norm + col, mask=k_col, other=0.0)
        w_b = tl.load(q_norm + HALF + col, mask=q_col, other=0.0) + tl.load(k_norm + HALF + col, mask=k_col, other=0.0)
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
    _store_kv(k_pool, k_at, k_mask, x, k_scale, k_head)
    _store_kv(k_pool, k_at + HALF, k_mask, y, k_scale, k_head)
    _store_kv(v_pool, v_at, v_mask, x, v_scale, v_head)
    _store_kv(v_pool, v_at + HALF, v_mask, y, v_scale, v_head)


@triton.jit
def _slot_words(slot, layer, head, n_kv, n_pages, WORDS: tl.constexpr):
    """Where a slot's words begin in a pool [layers, pages, n_kv, 64, WORDS]."""
    page = layer.to(tl.int64) * n_pages + (slot >> 6)
    return ((page * n_kv + head) * 64 + (slot & 63)) * WORDS


@triton.jit(do_not_specialize=["source", "target", "n_moves", "max_moves", "n_kv", "n_pages"])
def move_kv_kernel(
    k_pool, v_pool, source, target, n_moves, max_moves, n_kv, n_pages,
    WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (entry, layer, kv head): all of an entry's moves, CHUNK at a time, of K and V as 32-bit words."""
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
        tl.debug_barrier()
        tl.store(k_pool + given, k, mask=mask)
        tl.store(v_pool + given, v, mask=mask)
