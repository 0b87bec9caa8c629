"""How every linear kernel ends: the splits' sums added in order, bias and residual added, the tile stored."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

# Values of splits on their way to a program at a time. They go to the shared memory that the products took, 96 KiB and
# more for all but the smallest tiles.
_AHEAD = tl.constexpr(24576)


@triton.jit
def store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n):
    """Store ``total`` [columns, rows], scaled, plus bias and residual. ``residual`` may be ``out``."""
    inside_n, inside_m = offs_n < n, offs_m < rows
    inside = inside_m[:, None] & inside_n[None, :]
    at = offs_m[:, None].to(tl.int64) * n + offs_n[None, :]
    y = tl.trans(total)
    extra = tl.zeros(y.shape, tl.float32)
    if bias is not None:
        extra += tl.load(bias + offs_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        extra += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if w_scale is not None:
        y *= tl.load(w_scale + offs_n, mask=inside_n, other=0.0)[None, :]
        rowwise = tl.load(x_scale + offs_m, mask=inside_m, other=0.0)[:, None]
        y = tl.fma(y, tl.broadcast_to(rowwise, y.shape), extra)  # said, so that no compiler may choose per tile
    else:
        y += extra
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def post_split(own, partial, counter, SPLIT_K: tl.constexpr):
    """Write one split's sum [columns, rows] to ``partial`` [splits, tiles, columns, rows]; True for the program that
    comes last of its tile. Which one that is varies, what it then adds and in which order does not."""
    columns: tl.constexpr = own.shape[0]
    block_m: tl.constexpr = own.shape[1]
    at = _within(columns, block_m)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slot = (tl.program_id(1) * tiles + tile).to(tl.int64) * (columns * block_m)
    tl.store(partial + slot + at, own)
    tl.debug_barrier()  # the counter is raised by one thread, after what all of them wrote
    arrived = tl.atomic_add(counter + tile, 1, sem="acq_rel", scope="gpu")
    return arrived == SPLIT_K - 1


@triton.jit
def sum_splits(partial, counter, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr):
    """All splits' sums of this tile, added in order; the counter is ready for the next launch."""
    at = partial + _within(COLUMNS, BLOCK_M)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((COLUMNS, BLOCK_M), tl.float32)
    room: tl.constexpr = _AHEAD // (COLUMNS * BLOCK_M)
    ahead: tl.constexpr = SPLIT_K if room > SPLIT_K else room if room > 2 else 2
    # One by one, each would cost the memory's latency. Loads into registers are no help: ptxas moves them down to where
    # they are needed, to save registers.
    for split in tl.range(0, tl.num_programs(1), num_stages=1 + ahead):
        slot = (split * tiles + tile).to(tl.int64) * (COLUMNS * BLOCK_M)
        total += tl.load(at + slot, cache_modifier=".cg")
    tl.store(counter + tile, 0)
    return total


@triton.jit
def _within(COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr):
    return tl.arange(0, COLUMNS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
