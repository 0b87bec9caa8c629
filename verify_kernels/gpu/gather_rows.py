# mypy: disallow-untyped-defs=False

"""Chosen rows of a tensor: token embeddings, looked up and scaled, and the rows whose logits are wanted."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_previous, launch_options


@triton.jit(do_not_specialize=["index", "limit"])
def gather_rows_kernel(table, index, out, width, limit, scale, BLOCK: tl.constexpr):
    """Program (row, block of columns). An index outside [0, limit) reads as a row of zeros."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    readable = tl.where((at >= 0) & (at < limit), width, 0)
    value = tl.load(table + at * width + cols, mask=cols < readable, other=0.0).to(tl.float32) * scale
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=cols < width)


BLOCK = 1024
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def gather_rows(table: Tensor, index: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """out[i] = table[index[i]] * scale, in float32; zeros where index[i] is no row of table (padding).

    table: [n, width]; index: int32 [m]; out: [m, width]; table and out float16 or bfloat16, in tests also float32.
    """
    if out.numel() == 0:
        return
    limit, width = table.shape
    grid = (index.shape[0], triton.cdiv(width, BLOCK))
    options = launch_options(OPTIONS, out.device)
    gather_rows_kernel[grid](table, index, out, width, limit, scale, BLOCK=BLOCK, **options)


def compile_cases() -> list[CompileCase]:
    """Both types."""
    return [
        CompileCase(
            name=f"gather_rows {rows}",
            kernel=gather_rows_kernel,
            signature={
                "table": f"*{rows}", "index": "*i32", "out": f"*{rows}", "width": "i32", "limit": "i32",
                "scale": "fp32",
            },
            constexprs={"BLOCK": BLOCK},
            divisible=("width",),
            options=OPTIONS,
        )
        for rows in ("bf16", "fp16")
    ]  # fmt: skip
