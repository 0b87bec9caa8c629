"""A weight matrix to fp8 with a scale per output channel, once, when a model is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
ROWS_AT_ONCE = 4096  # a float32 copy of this many rows is held


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [n, k], floating-point, as float8_e4m3fn [n, k] and float32 [n]: weight[i] ~ q[i] * scale[i],
    scale = max|weight[i]| / 448; a channel of zeros has scale 1.

    Raises:
        ValueError: ``weight`` is no floating-point matrix, or holds a value that is not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight: is {weight.dtype} {tuple(weight.shape)}; must be a floating-point matrix")
    q = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = weight[start : start + ROWS_AT_ONCE].float()
        if not bool(part.isfinite().all()):
            raise ValueError("weight: holds values that are not finite; the checkpoint is damaged")
        largest = part.abs().amax(dim=1)
        own = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
        scale[start : start + ROWS_AT_ONCE] = own
        q[start : start + ROWS_AT_ONCE] = (part / own[:, None]).clamp(-LARGEST, LARGEST).to(q.dtype)
    return q, scale
