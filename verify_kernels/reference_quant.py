"""The product of rows with weights in a block format, operation for operation as the native kernels compute it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.quant_formats import GROUP, BlockMatrix

Floats = NDArray[np.float32]


def quantise_groups(x: Floats) -> tuple[NDArray[np.int32], Floats]:
    """int8 values [rows, groups, 32] and scales [rows, groups] of ``x`` [rows, k], k a multiple of 32."""
    grouped = x.reshape(len(x), -1, GROUP)
    peak = np.abs(grouped).max(axis=-1)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return np.rint(grouped * inverse[..., None]).astype(np.int32), peak / np.float32(127)


def block_linear(x: Tensor, weight: BlockMatrix) -> Tensor:
    """``x`` [rows, k] float32 times the transpose of ``weight``, the very bits of the native kernels."""
    q, activation = quantise_groups(x.numpy())
    n, k = weight.levels.shape
    parts = weight.scale.shape[1] * GROUP // k  # scales of a group
    levels = weight.levels.reshape(n, k // GROUP, parts, -1).astype(np.float64)
    q_parts = q.reshape(len(q), k // GROUP, parts, -1).astype(np.float64)
    total = np.zeros((len(q), n), np.float32)
    for g in range(k // GROUP):
        less_sum = -q[:, g].sum(axis=-1).astype(np.float32)
        for p in range(parts):
            # Sums of products stay below 2^24, so that doubles, whatever their order, and floats hold them exactly.
            dots = (q_parts[:, g, p] @ levels[:, g, p].T).astype(np.float32)
            part = dots * weight.scale[:, g * parts + p]
            if weight.low.any():
                part = fused(weight.low[:, g], less_sum[:, None], part)
            total = fused(part, activation[:, g, None], total)
    return torch.from_numpy(total)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c in one rounding.

    Two floats' product is exact in a double. Its sum with the third is rounded to odd there (to the neighbour whose
    last bit is set), after which rounding to float gives what rounding the exact sum would.
    """
    product = a.astype(np.float64) * b
    third = c.astype(np.float64)
    total = product + third
    back = total - product
    lost = (product - (total - back)) + (third - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    return np.where((lost != 0) & even, np.nextafter(total, towards), total).astype(np.float32)
