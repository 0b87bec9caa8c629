"""Row-wise operations in plain torch: norms, gates, fp8 rounding, embeddings and gathered rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from verify_kernels.backend import Prologue
from verify_kernels.gpu.act import Gate
from verify_kernels.gpu.kernel_launch import FP8_LARGEST
from verify_kernels.gpu.quantize import LEAST
from verify_kernels.reference.backend import rms_norm


def norm_rows(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, adds: bool = False) -> None:
    """out = rms(x) * weight, or out += it; see `verify_kernels.gpu.norm`."""
    normed = rms_norm(x.float(), weight.float(), eps)
    out.copy_(out.float() + normed if adds else normed)


def act_mul(gate_up: Tensor, out: Tensor, kind: Gate) -> None:
    """out = silu(gate) * up, or gelu_tanh(gate) * up; see `verify_kernels.gpu.act`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_((silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up)


def quantize_rows(
    x: Tensor, q: Tensor, scale: Tensor, *, prologue: Prologue = "none", norm: Tensor | None = None, eps: float = 0.0
) -> None:
    """Rows as e4m3 with a scale each; see `verify_kernels.gpu.quantize`."""
    y = x.float()
    if prologue == "rms":
        assert norm is not None
        y = rms_norm(y, norm.float(), eps)
    elif prologue != "none":
        gate, up = y.chunk(2, dim=1)
        y = (silu(gate) if prologue == "silu" else gelu(gate, approximate="tanh")) * up
    sound = y.isfinite().all(dim=1)
    largest = y.abs().amax(dim=1).clamp(min=LEAST)
    scale.copy_(torch.where(sound, largest / FP8_LARGEST, torch.nan))
    q.copy_(torch.where(sound[:, None], (y / scale[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST), 0.0))
