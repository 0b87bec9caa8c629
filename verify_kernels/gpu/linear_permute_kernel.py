"""Gathers the columns of rows."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def permute_columns_kernel(x, perm, out, k, BLOCK: tl.constexpr):
    """Program (row, block of columns). A column outside [0, k) reads as 0."""
    row = tl.program_id(0).to(tl.int64) * k
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < k
    source = tl.load(perm + cols, mask=inside, other=0)
    value = tl.load(x + row + source, mask=inside & (source >= 0) & (source < k), other=0.0)
    tl.store(out + row + cols, value, mask=inside)
