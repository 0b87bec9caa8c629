"""Residual add and RMSNorm of one row per program."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight, hidden, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps) * weight.to(tl.float32)


@triton.jit
def add_norm_kernel(residual, y, post_norm, norm, out, hidden, eps, BLOCK: tl.constexpr):
    """One program per row; BLOCK >= hidden, so that the whole row is one reduction of fixed order."""
    row = tl.program_id(0).to(tl.int64) * hidden
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    # Weights are read first: they come from far, and the compiler may not move a read across a store.
    if post_norm is not None:
        post_weight = tl.load(post_norm + cols, mask=inside, other=0.0)
    if norm is not None:
        weight = tl.load(norm + cols, mask=inside, other=0.0)
    x = tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        added = tl.load(y + row + cols, mask=inside, other=0.0).to(tl.float32)
        if post_norm is not None:
            added = _normed(added, post_weight, hidden, eps)
        stored = (x + added).to(residual.dtype.element_ty)
        tl.store(residual + row + cols, stored, mask=inside)
        x = stored.to(tl.float32)
    if norm is not None:
        x = _normed(x, weight, hidden, eps)
        tl.store(out + row + cols, x.to(out.dtype.element_ty), mask=inside)
