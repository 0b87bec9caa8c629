"""Rows to fp8 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from verify_kernels.gpu.quantize import Prologue

LEAST = 1e-30  # of a row's largest value


def quantize_rows(
    x: Tensor, q: Tensor, scale: Tensor, *, prologue: Prologue = "none", norm: Tensor | None = None, eps: float = 0.0
) -> None:
    """Rows as e4m3 with a scale each; see `verify_kernels.gpu.quantize`."""
    y = x.float()
    if prologue == "rms":
        assert norm is not None
        y = y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + eps) * norm.float()
    elif prologue != "none":
        gate, up = y.chunk(2, dim=1)
        y = (silu(gate) if prologue == "silu" else gelu(gate, approximate="tanh")) * up
    sound = y.isfinite().all(dim=1)
    largest = y.abs().amax(dim=1).clamp(min=LEAST)
    scale.copy_(torch.where(sound, largest / 448.0, torch.nan))
    q.copy_(torch.where(sound[:, None], (y / scale[:, None]).clamp(-448.0, 448.0), 0.0))
