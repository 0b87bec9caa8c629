"""A linear layer in plain torch."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.linear_tiles import LinearMode
from verify_kernels.gpu.linear_workspace import LinearWorkspace


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: LinearMode = "bitwise",
) -> None:
    """out = x weight^T + bias + residual in float32; see `verify_kernels.gpu.linear`."""
    store(x.float() @ weight.float().t(), out, bias, residual)


def store(y: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out = y + bias + residual, y float32."""
    if bias is not None:
        y = y + bias.float()
    out.copy_(y if residual is None else y + residual.float())
