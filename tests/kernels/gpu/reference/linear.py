"""Linear layers in plain torch: 16-bit, fp8 and 4-bit weights."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.linear_plan import LinearWorkspace
from verify_kernels.gpu.quantized_weights import Int4Weight, unpack_int4


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    scales: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual in float32; see `verify_kernels.gpu.linear`."""
    y = x.float() @ weight.float().t()
    store(y if scales is None else y * scales[1] * scales[0][:, None], out, bias, residual)


def store(y: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out = y + bias + residual, y float32."""
    if bias is not None:
        y = y + bias.float()
    out.copy_(y if residual is None else y + residual.float())


def linear_int4(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual in float32; see `verify_kernels.gpu.linear_int4`."""
    store(x.float() @ unpack_int4(weight).t(), out, bias, residual)
