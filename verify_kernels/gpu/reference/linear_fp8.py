"""A linear layer of fp8 operands in plain torch."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.linear_tiles import LinearMode
from verify_kernels.gpu.linear_workspace import LinearWorkspace
from verify_kernels.gpu.reference.linear import store


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: LinearMode = "bitwise",
) -> None:
    """out = (x * x_scale) (weight * weight_scale)^T + bias + residual; see `verify_kernels.gpu.linear_fp8`."""
    y = x.float() @ weight.float().t()
    store(y * weight_scale * x_scale[:, None], out, bias, residual)
