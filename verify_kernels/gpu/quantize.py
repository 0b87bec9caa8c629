# mypy: disallow-untyped-defs=False

"""Rows to fp8 with a scale each, a norm or gate in front of it in the same launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.backend import Prologue
from verify_kernels.gpu.act import gated
from verify_kernels.gpu.kernel_launch import FP8_LARGEST, CompileCase, await_before_linear, launch_options, release_next

LEAST = 1e-30  # amax below which 448 / amax would overflow; such a row is zeros
_LARGEST = tl.constexpr(FP8_LARGEST)
_INVERSE = tl.constexpr(1.0 / FP8_LARGEST)
_NORMAL = tl.constexpr(0.015625)  # least normal e4m3 value
_LEAST = tl.constexpr(LEAST)
_MOST = tl.constexpr(3.4028234663852886e38)  # finite float32


@triton.jit
def _values(x, row, cols, k, PROLOGUE: tl.constexpr):
    """Float32 values of one stretch of a row; the norm's factor and weight are not in yet."""
    inside = cols < k
    if PROLOGUE == "silu" or PROLOGUE == "gelu":
        gate = tl.load(x + row * (2 * k) + cols, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * (2 * k) + k + cols, mask=inside, other=0.0).to(tl.float32)
        return gated(gate, up, PROLOGUE == "gelu")
    else:
        return tl.load(x + row * k + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weighted(v, norm, cols, k, PROLOGUE: tl.constexpr):
    if PROLOGUE == "rms":
        v *= tl.load(norm + cols, mask=cols < k, other=0.0).to(tl.float32)
    return v


@triton.jit
def _rounded(v):
    """``v``, at most 448 in size, to the nearest e4m3 value, ties to even. By hand and exact, so that the conversion
    after it has nothing to round: triton's interpreter does not carry from the mantissa to the exponent."""
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power, _NORMAL) * 1572864.0  # 1.5 * 2^20: its last place is the third bit after power's
    return (v + shift) - shift


@triton.jit
def _size(v):
    """|v|, infinity for values that are not finite: a maximum would drop a NaN."""
    size = tl.abs(v)
    return tl.where(size <= _MOST, size, float("inf"))


@triton.jit
def _store(v, factor, inverse, sound, q, at, inside):
    """Round v * factor * inverse; zeros where the row is not sound."""
    scaled = v * factor * inverse
    bounded = tl.where(scaled > _LARGEST, _LARGEST, tl.where(scaled < -_LARGEST, -_LARGEST, scaled))
    rounded = tl.where(sound, _rounded(bounded), 0.0)
    tl.store(q + at, rounded.to(q.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    x, norm, q, scale_out, k, eps, PROLOGUE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    """One program per row. WHOLE: the row fits in BLOCK and is read once; else twice, in stretches of BLOCK."""
    await_before_linear()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    v = _values(x, row, lanes, k, PROLOGUE)
    squares = v * v
    v = _weighted(v, norm, lanes, k, PROLOGUE)
    largest = _size(v)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            u = _values(x, row, start + lanes, k, PROLOGUE)
            squares = tl.fma(u, u, squares)
            largest = tl.maximum(largest, _size(_weighted(u, norm, start + lanes, k, PROLOGUE)))
    factor = 1.0
    if PROLOGUE == "rms":
        factor = tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
    amax = tl.max(largest, axis=0)
    sound = amax < float("inf")
    scale = tl.maximum(tl.where(sound, amax, 1.0) * factor, _LEAST) * _INVERSE
    inverse = tl.div_rn(1.0, scale)
    release_next()
    tl.store(scale_out + row, tl.where(sound, scale, float("nan")))
    _store(v, factor, inverse, sound, q, row * k + lanes, lanes < k)
    if not WHOLE:
        for start in range(BLOCK, k, BLOCK):
            cols = start + lanes
            u = _weighted(_values(x, row, cols, k, PROLOGUE), norm, cols, k, PROLOGUE)
            _store(u, factor, inverse, sound, q, row * k + cols, cols < k)


PROLOGUES: tuple[Prologue, ...] = ("none", "rms", "silu", "gelu")
BLOCKS = (1024, 2048, 4096, 8192)
PER_WARP = 512


def quantize_rows(
    x: Tensor, q: Tensor, scale: Tensor, *, prologue: Prologue = "none", norm: Tensor | None = None, eps: float = 0.0
) -> None:
    """scale[r] = max|y[r]| / 448, q[r] = y[r] / scale[r] as e4m3, where y is x, rms(x) * norm, silu(gate) * up or
    gelu_tanh(gate) * up; rms(x) = x / sqrt(mean(x^2) + eps), all in float32.

    x: [rows, k], or [rows, 2k] = [gate | up], float16 or bfloat16, in tests also float32; q: float8_e4m3fn [rows, k];
    scale: float32 [rows]; norm: [k] for "rms", else None. A row of zeros has a tiny scale. A row that holds a value
    that is not finite has the scale NaN, so that whatever is computed from it is NaN. A row's result does not depend on
    the other rows.
    """
    rows, k = q.shape
    block = _block(k)
    quantize_rows_kernel[(rows,)](
        x, norm, q, scale, k, eps, PROLOGUE=prologue, BLOCK=block, WHOLE=k <= block,
        **launch_options(_options(block), x.device),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every prologue at every block; rows of several blocks for the widest."""
    return [
        _case(kind, prologue, block, whole)
        for kind in ("bf16", "fp16")
        for prologue in PROLOGUES
        for block in BLOCKS
        for whole in ((True, False) if block == BLOCKS[-1] else (True,))
    ]


def _options(block: int) -> dict[str, int]:
    return {"num_warps": block // PER_WARP, "num_stages": 1}


def _case(kind: str, prologue: Prologue, block: int, whole: bool) -> CompileCase:
    constants = {"PROLOGUE": prologue, "BLOCK": block, "WHOLE": whole} | ({} if prologue == "rms" else {"norm": None})
    return CompileCase.of(
        f"quantize {kind} {prologue} {block}{'' if whole else ' and more'}",
        quantize_rows_kernel,
        constants,
        {"x": f"*{kind}", "norm": f"*{kind}", "q": "*fp8e4nv"},
        divisible=("k",),
        options=_options(block),
    )


def _block(k: int) -> int:
    """A function of the row's width alone: the order of a norm's sum depends on it."""
    return next((block for block in BLOCKS if block >= k), BLOCKS[-1])
