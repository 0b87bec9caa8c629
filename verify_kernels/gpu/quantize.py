"""Rows to fp8 with a scale each, a norm or gate in front of it in the same launch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verify_kernels.gpu.argument_checks import ROW_TYPES, check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.quantize_kernel import quantize_rows_kernel

Prologue = Literal["none", "rms", "silu", "gelu"]

PROLOGUES: tuple[Prologue, ...] = ("none", "rms", "silu", "gelu")
BLOCKS = (1024, 2048, 4096, 8192)
PER_WARP = 512
# Of a float32 row in several stretches. Left alone, ptxas of triton 3.6 spills a few bytes so that two programs fit.
REGISTERS = 128


def quantize_rows(
    x: Tensor, q: Tensor, scale: Tensor, *, prologue: Prologue = "none", norm: Tensor | None = None, eps: float = 0.0
) -> None:
    """scale[r] = max|y[r]| / 448, q[r] = y[r] / scale[r] as e4m3, where y is x, rms(x) * norm, silu(gate) * up or
    gelu_tanh(gate) * up; rms(x) = x / sqrt(mean(x^2) + eps), all in float32.

    x: [rows, k], or [rows, 2k] = [gate | up], float32, float16 or bfloat16; q: float8_e4m3fn [rows, k]; scale: float32
    [rows]; norm: [k] for "rms", else None. A row of zeros has a tiny scale. A row that holds a value that is not finite
    has the scale NaN, so that whatever is computed from it is NaN. A row's result does not depend on the other rows.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, ``prologue`` is unknown or does not go with ``norm``.
    """
    _check(x, q, scale, prologue, norm)
    rows, k = q.shape
    if rows == 0:
        return
    block = _block(k)
    quantize_rows_kernel[(rows,)](
        x, norm, q, scale, k, eps, PROLOGUE=prologue, BLOCK=block, WHOLE=k <= block,
        **_options(block, x.dtype == torch.float32 and k > block and torch.version.hip is None),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every prologue at every block; rows of several blocks for the widest."""
    return [
        _case(kind, prologue, block, whole)
        for kind in ("bf16", "fp16", "fp32")
        for prologue in PROLOGUES
        for block in BLOCKS
        for whole in ((True, False) if block == BLOCKS[-1] else (True,))
    ]


def _options(block: int, roomy: bool) -> dict[str, int]:
    options = {"num_warps": block // PER_WARP, "num_stages": 1}
    return options | {"maxnreg": REGISTERS} if roomy else options


def _case(kind: str, prologue: Prologue, block: int, whole: bool) -> CompileCase:
    signature = {"x": f"*{kind}", "q": "*fp8e4nv", "scale_out": "*fp32", "k": "i32", "eps": "fp32"}
    constants = {"PROLOGUE": prologue, "BLOCK": block, "WHOLE": whole}
    if prologue == "rms":
        signature["norm"] = f"*{kind}"
    return CompileCase(
        name=f"quantize {kind} {prologue} {block}{'' if whole else ' and more'}",
        kernel=quantize_rows_kernel,
        signature=signature,
        constexprs=constants if prologue == "rms" else {**constants, "norm": None},
        divisible=tuple(name for name in signature if name != "eps"),
        options=_options(block, kind == "fp32" and not whole),
    )


def _block(k: int) -> int:
    """A function of the row's width alone: the order of a norm's sum depends on it."""
    return next((block for block in BLOCKS if block >= k), BLOCKS[-1])


def _check(x: Tensor, q: Tensor, scale: Tensor, prologue: Prologue, norm: Tensor | None) -> None:
    if prologue not in PROLOGUES:
        raise ValueError(f"prologue: {prologue!r} is not known; must be one of {', '.join(PROLOGUES)}")
    check_rank("q", q, 2)
    rows, k = q.shape
    if k == 0:
        raise ValueError("q: has rows of 0 values; must have one at least")
    check_tensor("q", q, (rows, k), (torch.float8_e4m3fn,), q.device)
    check_tensor("x", x, (rows, 2 * k if prologue in ("silu", "gelu") else k), ROW_TYPES, q.device)
    check_tensor("scale", scale, (rows,), (torch.float32,), q.device)
    if (norm is not None) != (prologue == "rms"):
        raise ValueError(f"norm: is {'None' if norm is None else 'given'}; prologue is {prologue!r}")
    if norm is not None:
        check_tensor("norm", norm, (k,), ROW_TYPES, q.device)
