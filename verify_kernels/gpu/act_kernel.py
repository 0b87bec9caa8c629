"""Gated activations, elementwise."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def act_mul_kernel(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    pair = gate_up + row * 2 * width + cols
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + width, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh z) / 2 is sigmoid(2 z), and an exponential is at hand where a tanh is not.
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        logit = gate
    value = gate / (1.0 + tl.exp(-logit)) * up
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=inside)
