"""Rows of a table by index, scaled."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["index", "limit"])
def gather_rows_kernel(table, index, out, width, limit, scale, BLOCK: tl.constexpr):
    """Program (row, block of columns). An index outside [0, limit) reads as a row of zeros."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    readable = tl.where((at >= 0) & (at < limit), width, 0)
    value = tl.load(table + at * width + cols, mask=cols < readable, other=0.0).to(tl.float32) * scale
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=cols < width)
