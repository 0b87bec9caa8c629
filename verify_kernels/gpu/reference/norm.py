"""Residual add and RMSNorm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(
    residual: Tensor,
    *,
    eps: float,
    y: Tensor | None = None,
    post_norm: Tensor | None = None,
    norm: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """residual += y, or += rms(y) * post_norm; then out = rms(residual) * norm; see `verify_kernels.gpu.norm`."""
    if y is not None:
        added = y.float() if post_norm is None else rms_norm(y.float(), post_norm.float(), eps)
        residual.copy_(residual.float() + added)
    if norm is not None and out is not None:
        out.copy_(rms_norm(residual.float(), norm.float(), eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
