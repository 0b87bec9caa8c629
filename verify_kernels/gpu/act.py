# mypy: disallow-untyped-defs=False

"""The gate of an MLP: SiLU or GELU of one half of a row, times the other."""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_before_linear, launch_options, release_next


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """gelu_tanh(gate) * up, or silu(gate) * up."""
    if GELU:
        # (1 + tanh z) / 2 is sigmoid(2 z), and an exponential is at hand where a tanh is not.
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        logit = gate
    return gate / (1.0 + tl.exp(-logit)) * up


@triton.jit
def act_mul_kernel(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
    await_before_linear()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    pair = gate_up + row * 2 * width + cols
    gate = tl.load(pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + width, mask=inside, other=0.0).to(tl.float32)
    value = gated(gate, up, GELU)
    release_next()
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=inside)


Gate = Literal["silu", "gelu"]
BLOCK = 1024
OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


def act_mul(gate_up: Tensor, out: Tensor, kind: Gate) -> None:
    """out = silu(gate) * up, or gelu_tanh(gate) * up, in float32.

    gate_up: [rows, 2 width] = [gate | up]; out: [rows, width]; float32, float16 or bfloat16 each.
    """
    rows, width = out.shape
    grid = (rows, triton.cdiv(width, BLOCK))
    options = launch_options(OPTIONS, out.device)
    act_mul_kernel[grid](gate_up, out, width, GELU=kind == "gelu", BLOCK=BLOCK, **options)


def compile_cases() -> list[CompileCase]:
    """Both activations in both dtypes."""
    return [
        CompileCase.of(
            f"act_mul {rows} {'gelu' if gelu else 'silu'}",
            act_mul_kernel,
            {"GELU": gelu, "BLOCK": BLOCK},
            dict.fromkeys(("gate_up", "out"), f"*{rows}"),
            divisible=("width",),
            options=OPTIONS,
        )
        for rows in ("bf16", "fp16")
        for gelu in (False, True)
    ]
