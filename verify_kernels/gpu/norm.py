# mypy: disallow-untyped-defs=False

"""RMSNorm of rows, stored or added to the residual stream."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_before_linear, launch_options, release_next


@triton.jit
def norm_kernel(x, weight, out, hidden, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row; BLOCK >= hidden, so that the whole row is one reduction of fixed order."""
    row = tl.program_id(0).to(tl.int64) * hidden
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    w = tl.load(weight + cols, mask=inside, other=0.0)  # before the wait: it comes from far
    await_before_linear()
    v = tl.load(x + row + cols, mask=inside, other=0.0).to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / hidden + eps) * w.to(tl.float32)
    if ADDS:
        v = tl.load(out + row + cols, mask=inside, other=0.0).to(tl.float32) + v
    release_next()
    tl.store(out + row + cols, v.to(out.dtype.element_ty), mask=inside)


BLOCKS = (1024, 2048, 4096, 8192, 16384)  # values a program holds; the least that holds the row is taken
MAX_HIDDEN = BLOCKS[-1]  # values in a row
VALUES_PER_WARP = 256  # 8 per thread: one 16-byte load of two-byte values
WIDEST_REGISTERS = 128  # per thread of the widest block; 16 warps of them fill a multiprocessor's 65,536


def norm_rows(x: Tensor, weight: Tensor, out: Tensor, *, eps: float, adds: bool = False) -> None:
    """out = rms(x) * weight; with ``adds``, out += rms(x) * weight. rms(x) = x / sqrt(mean(x^2) + eps).

    x, out: [rows, hidden], hidden <= 16384; weight: [hidden]; all float16 or bfloat16, in tests also float32. Sums
    are float32. A row's result does not depend on the other rows. The weight is read before the kernel waits
    (`await_only`): the launch just before must not write it.

    Raises:
        ValueError: rows are wider than 16384.
    """
    rows, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"x: has rows of {hidden}; must be at most {MAX_HIDDEN} wide")
    block = next(block for block in BLOCKS if block >= hidden)
    options = launch_options(_options(block), x.device)
    norm_kernel[(rows,)](x, weight, out, hidden, eps, ADDS=adds, BLOCK=block, **options)


def compile_cases() -> list[CompileCase]:
    """Both forms at every block, in both types."""
    return [
        CompileCase.of(
            f"norm {block} {rows}{' added' if adds else ''}",
            norm_kernel,
            {"BLOCK": block, "ADDS": adds},
            dict.fromkeys(("x", "weight", "out"), f"*{rows}"),
            divisible=("hidden",),
            options=_options(block),
        )
        for block in BLOCKS
        for rows in ("bf16", "fp16")
        for adds in (False, True)
    ]


def _options(block: int) -> dict[str, int]:
    """Launch options, a function of the row's width alone, as is the order of a row's sums."""
    options = {"num_warps": min(16, block // VALUES_PER_WARP), "num_stages": 1, "enable_fp_fusion": False}
    # ptxas would rather spill the widest rows than give up a second block beside this one.
    return options | {"maxnreg": WIDEST_REGISTERS} if block == MAX_HIDDEN else options
