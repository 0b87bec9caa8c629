"""Rows with their channels in another order, for weights whose input channels were permuted."""

from __future__ import annotations

import triton
from torch import Tensor

from verify_kernels.gpu.argument_checks import INDEX, ROW_TYPES, check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.linear_permute_kernel import permute_columns_kernel

BLOCK = 1024
WARPS = 4


def permute_columns(x: Tensor, perm: Tensor, out: Tensor) -> None:
    """out[r, j] = x[r, perm[j]]; a place with no channel of x gets 0.

    x, out: [rows, k] of one type, float32, float16 or bfloat16; perm: int32 [k].

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or ``out`` is ``x``.
    """
    check_rank("x", x, 2)
    rows, k = x.shape
    check_tensor("x", x, (rows, k), ROW_TYPES, x.device)
    check_tensor("perm", perm, (k,), INDEX, x.device)
    check_tensor("out", out, (rows, k), (x.dtype,), x.device)
    if x.numel() == 0:
        return
    if out.data_ptr() == x.data_ptr():
        raise ValueError("out: is x; channels would be overwritten before they are read, pass another tensor")
    grid = (rows, triton.cdiv(k, BLOCK))
    permute_columns_kernel[grid](x, perm, out, k, BLOCK=BLOCK, num_warps=WARPS, num_stages=1)


def compile_cases() -> list[CompileCase]:
    """Both 16-bit types."""
    return [
        CompileCase(
            name=f"permute {kind}",
            kernel=permute_columns_kernel,
            signature={"x": f"*{kind}", "perm": "*i32", "out": f"*{kind}", "k": "i32"},
            constexprs={"BLOCK": BLOCK},
            divisible=("x", "perm", "out", "k"),
            options={"num_warps": WARPS, "num_stages": 1},
        )
        for kind in ("bf16", "fp16")
    ]
