"""Batch-invariant linear layer of fp8 operands (W8A8): a scale per row and a scale per output channel."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.kernel_launch import FP8, CompileCase, check_rank, check_tensor
from verify_kernels.gpu.linear import linear_kernel
from verify_kernels.gpu.linear_plan import LinearWorkspace, check_result, launches, linear_case, plan_launch


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
    """out = (x * x_scale) (weight * weight_scale)^T + bias + residual, summed in float32 and rounded once.

    x: float8_e4m3fn [rows, k] with x_scale float32 [rows] (`verify_kernels.gpu.quantize`); weight: float8_e4m3fn
    [n, k] with weight_scale float32 [n] (`verify_kernels.gpu.quantized_weights`); bias: [n]; out, residual: [rows, n],
    may be the same tensor; float32, float16 or bfloat16 each. Needs compute capability 9.0.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or the workspace is too small.
    """
    _check(x, x_scale, weight, weight_scale)
    (rows, k), n = x.shape, weight.shape[0]
    check_result(out, rows, n, x.device, inputs=x, bias=bias, residual=residual)
    launch = plan_launch(rows, n, k, "fp8")
    workspace.check(launch, x.device)
    if rows == 0:
        return
    linear_kernel[launch.grid](
        x, weight, out, bias, residual, x_scale, weight_scale, workspace.partials, workspace.counters, rows, n, k,
        **launch.constants(), EVEN_K=k % launch.order.block_k == 0, **launch.options(torch.version.hip is not None),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every tile, whole and in splits, with all that can be added."""
    pointers = {"x": "fp8e4nv", "w": "fp8e4nv", "x_scale": "fp32", "w_scale": "fp32"}
    return [
        linear_case(
            f"fp8 to {kind}", linear_kernel, launch, False,
            pointers={**pointers, "out": kind, "bias": kind, "residual": kind}, constants={"EVEN_K": True},
        )
        for kind in ("bf16", "fp16")
        for launch in launches("fp8")
    ]  # fmt: skip


def _check(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    check_rank("x", x, 2)
    check_rank("weight", weight, 2)
    (rows, k), n = x.shape, weight.shape[0]
    if k == 0 or n == 0:
        raise ValueError(f"weight: has shape {tuple(weight.shape)}; must have a row and a column at least")
    check_tensor("x", x, (rows, k), (FP8,), x.device)
    check_tensor("x_scale", x_scale, (rows,), (torch.float32,), x.device)
    check_tensor("weight", weight, (n, k), (FP8,), x.device)
    check_tensor("weight_scale", weight_scale, (n,), (torch.float32,), x.device)
