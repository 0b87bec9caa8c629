"""Kernels and cases with known faults, which ahead-of-time compilation must report by name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from verify_kernels.gpu.kernel_launch import CompileCase, await_previous


@triton.jit
def scale_kernel(x, out, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr = 256):
    await_previous()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(tl.float32) * FACTOR, mask=i < n)


@triton.jit
def hoard_kernel(x, out, SIZE: tl.constexpr):
    await_previous()
    i = tl.arange(0, SIZE)
    values = tl.load(x + i)
    tl.store(out + i, values / tl.sum(values))  # all values are needed again after the sum


@triton.jit
def matmul_kernel(a, b, out, K, M: tl.constexpr, BLOCK_K: tl.constexpr):
    await_previous()
    m = tl.arange(0, M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((M, M), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        right = tl.load(b + m[None, :] * K + (start + k)[:, None])
        acc += tl.dot(left, right)
    tl.store(out + m[:, None] * M + m[None, :], acc)


@triton.jit
def hasty_kernel(x, out):
    i = tl.arange(0, 64)
    tl.store(out + i, tl.load(x + i))  # while earlier launches may still read it
    await_previous()


@triton.jit
def unlowered_kernel(x, out):
    i = tl.arange(0, 64)
    tl.store(out + i, tl.load(x + i) + tl.load(x + i + 1))  # no chip adds float8


@triton.jit
def mistyped_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) + no_such_name)  # noqa: F821 - the planted fault


class _Bomb:
    """A constant over which the compiling process dies."""

    @property
    def cache_key(self) -> str:
        print("planted crash", flush=True)
        os._exit(7)


_SCALE = CompileCase(
    "scale", scale_kernel, {"x": "*bf16", "out": "*bf16", "n": "i32"}, {"FACTOR": 2.0}, options={"num_warps": 4}
)
_FEW_REGISTERS = {"num_warps": 1, "maxnreg": 32, "waves_per_eu": 6}  # NVIDIA takes the second, AMD the third
_MATMUL_TYPES = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}


def compile_cases() -> list[CompileCase]:
    """One sound case, then one for every fault."""
    hoard = {"x": "*fp32", "out": "*fp32"}
    tile: dict[str, Any] = {"M": 64, "BLOCK_K": 256}
    return [
        _SCALE,
        replace(_SCALE, name="fp8", signature={**_SCALE.signature, "x": "*fp8e4nv"}),
        replace(_SCALE, name="fp8_constant", constexprs={"FACTOR": tl.float8e4nv}, targets=("gfx",)),
        CompileCase("spills", hoard_kernel, hoard, {"SIZE": 1 << 13}, options=_FEW_REGISTERS),
        CompileCase("shared", matmul_kernel, _MATMUL_TYPES, tile, ("K",), {"num_stages": 5}, ("sm_",)),
        CompileCase("hasty", hasty_kernel, hoard, {}),
        CompileCase("does_not_compile", mistyped_kernel, hoard, {"SIZE": 64}),
        CompileCase("not_lowered", unlowered_kernel, {"x": "*fp8e4nv", "out": "*fp8e4nv"}, {}, targets=("sm_90",)),
        replace(_SCALE, name="missing", signature={"x": "*bf16", "n": "i32"}),
        replace(_SCALE, name="unknown", signature={**_SCALE.signature, "y": "*bf16"}),
        replace(_SCALE, name="both", constexprs={"FACTOR": 2.0, "n": 1}),
        replace(_SCALE, name="constexpr_typed", signature={**_SCALE.signature, "BLOCK": "i32"}),
        replace(_SCALE, name="divisible", divisible=("FACTOR",)),
        replace(_SCALE, name="option", options={"num_wraps": 4}),
        replace(_SCALE, name="refused", options={"matrix_instr_nonkdim": 16}),
        replace(_SCALE, name="crash", constexprs={"FACTOR": _Bomb()}),
    ]
