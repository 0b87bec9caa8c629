"""Linear layers in plain torch: 16-bit, fp8 and 4-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.linear_plan import LinearWorkspace
from verify_kernels.gpu.quantized_weights import CHUNK, Int4Weight


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual in float32; see `verify_kernels.gpu.linear`."""
    store(x.float() @ weight.float().t(), out, bias, residual)


def store(y: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """out = y + bias + residual, y float32."""
    if bias is not None:
        y = y + bias.float()
    out.copy_(y if residual is None else y + residual.float())


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
) -> None:
    """out = (x * x_scale) (weight * weight_scale)^T + bias + residual; see `verify_kernels.gpu.linear`."""
    y = x.float() @ weight.float().t()
    store(y * weight_scale * x_scale[:, None], out, bias, residual)


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


def permute_columns(x: Tensor, perm: Tensor, out: Tensor) -> None:
    """out[r, j] = x[r, perm[j]], 0 if the channel does not exist; see `verify_kernels.gpu.linear_int4`."""
    known = (perm >= 0) & (perm < x.shape[1])
    gathered = x[:, perm.clamp(0, x.shape[1] - 1).long()]
    out.copy_(gathered.masked_fill(~known, 0.0))


def unpack_int4(weight: Int4Weight) -> Tensor:
    """The float32 matrix [n, k] that ``weight`` stands for, input channels in their own order."""
    chunks, blocks, _, width = weight.words.shape
    words = weight.words.to(torch.int32)
    levels = torch.stack([(words >> shift) & 15 for shift in (0, 4, 8, 12)], dim=3)
    levels = levels.permute(0, 2, 1, 3, 4).reshape(chunks * CHUNK, blocks * 4 * width)
    quants = weight.quants.permute(0, 3, 1, 2).reshape(chunks * CHUNK, -1)
    scales = (quants & 0xFFFF).to(torch.int16).view(weight.scale_type).float()
    matrix = (levels - _spread(quants >> 16, weight)) * _spread(scales, weight)
    matrix = matrix[: weight.n, : weight.k]
    if weight.perm is None:
        return matrix
    return torch.empty_like(matrix).index_copy_(1, weight.perm.long(), matrix)


def _spread(values: Tensor, weight: Int4Weight) -> Tensor:
    """Values by group as values by input channel."""
    return values.repeat_interleave(weight.group, dim=1)
