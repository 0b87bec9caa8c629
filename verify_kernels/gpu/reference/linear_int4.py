"""A linear layer of 4-bit weights in plain torch."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.linear_int4_weight import Int4Weight, unpack_int4
from verify_kernels.gpu.linear_tiles import LinearMode
from verify_kernels.gpu.linear_workspace import LinearWorkspace
from verify_kernels.gpu.reference.linear import store


def linear_int4(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: LinearMode = "bitwise",
) -> None:
    """out = x weight^T + bias + residual in float32; see `verify_kernels.gpu.linear_int4`."""
    store(x.float() @ unpack_int4(weight).t(), out, bias, residual)
