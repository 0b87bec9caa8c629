"""Lists of tokens, one per split, looked at and shortened side by side: a tile is some columns of all of them."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.sampling_math_kernel import read_logits


@triton.jit
def list_tile(places, counts, column, row, inverse, TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Entries column .. column + COLUMNS - 1 of every split's list: whether there is one, its token, its z."""
    split = tl.arange(0, SPLITS)[:, None]
    at = column + tl.arange(0, COLUMNS)[None, :]
    present = at < counts[:, None]
    token = split * TOKENS + tl.load(places + split * TOKENS + at, mask=present, other=0).to(tl.int32)
    return present, token, read_logits(row, token, present, inverse)


@triton.jit
def append(places, counts, kept, token, TOKENS: tl.constexpr, SPLITS: tl.constexpr):
    """Put the ``kept`` of a tile at the ends of the lists; the new counts.

    A list may be shortened in place, as its entries move to where they were or before: hence the barrier, behind
    which all of the tile has been read.
    """
    split = tl.arange(0, SPLITS)[:, None]
    rank = tl.cumsum(kept.to(tl.int32), axis=1) - 1
    tl.debug_barrier()
    tl.store(places + split * TOKENS + counts[:, None] + rank, (token - split * TOKENS).to(tl.int16), mask=kept)
    return counts + tl.sum(kept.to(tl.int32), axis=1)


@triton.jit
def keeps(z, token, cut_z, cut_id):
    """Whether the cut leaves a token: it is before the cut, or at it, by falling z and rising id."""
    return (z > cut_z) | ((z == cut_z) & (token <= cut_id))
