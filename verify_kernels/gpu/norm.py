# mypy: disallow-untyped-defs=False

"""Residual add and RMSNorm in one launch, with the norm of the added part that Gemma's layers need."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_before_linear, launch_options, release_next


@triton.jit
def _normed(x, weight, hidden, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps) * weight.to(tl.float32)


@triton.jit
def add_norm_kernel(residual, y, post_norm, norm, out, hidden, eps, BLOCK: tl.constexpr):
    """One program per row; BLOCK >= hidden, so that the whole row is one reduction of fixed order."""
    row = tl.program_id(0).to(tl.int64) * hidden
    cols = tl.arange(0, BLOCK)
    inside = cols < hidden
    # Weights are read first: they come from far, and the compiler may not move a read across a store.
    if post_norm is not None:
        post_weight = tl.load(post_norm + cols, mask=inside, other=0.0)
    if norm is not None:
        weight = tl.load(norm + cols, mask=inside, other=0.0)
    await_before_linear()
    x = tl.load(residual + row + cols, mask=inside, other=0.0).to(tl.float32)
    if y is not None:
        added = tl.load(y + row + cols, mask=inside, other=0.0).to(tl.float32)
        if post_norm is not None:
            added = _normed(added, post_weight, hidden, eps)
        stored = (x + added).to(residual.dtype.element_ty)
        tl.store(residual + row + cols, stored, mask=inside)
        x = stored.to(tl.float32)
    if norm is not None:
        x = _normed(x, weight, hidden, eps)
        release_next()
        tl.store(out + row + cols, x.to(out.dtype.element_ty), mask=inside)


BLOCKS = (1024, 2048, 4096, 8192, 16384)  # values a program holds; the least that holds the row is taken
MAX_HIDDEN = BLOCKS[-1]  # values in a row
VALUES_PER_WARP = 256  # 8 per thread: one 16-byte load of two-byte values
WIDEST_REGISTERS = 128  # per thread of the widest block; 16 warps of them fill a multiprocessor's 65,536


def add_norm(
    residual: Tensor,
    *,
    eps: float,
    y: Tensor | None = None,
    post_norm: Tensor | None = None,
    norm: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """residual += y, or += rms(y) * post_norm; then out = rms(residual) * norm. rms(x) = x / sqrt(mean(x^2) + eps).

    residual (changed where y is given), y, out: [rows, hidden], hidden <= 16384, float32, float16 or bfloat16 each;
    post_norm, norm: [hidden]. Sums are float32; ``out`` is the norm of the residual as stored. A row's result does not
    depend on the other rows. Norms are read before the kernel waits (`await_only`): the launch just before must not
    write them.

    Raises:
        ValueError: rows are wider than 16384.
    """
    rows, hidden = residual.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"residual: has rows of {hidden}; must be at most {MAX_HIDDEN} wide")
    if rows == 0:
        return
    block = next(block for block in BLOCKS if block >= hidden)
    options = launch_options(_options(block), residual.device)
    add_norm_kernel[(rows,)](residual, y, post_norm, norm, out, hidden, eps, BLOCK=block, **options)


def compile_cases() -> list[CompileCase]:
    """Every mode at every block, with a residual stream of the activations' type or float32."""
    return [
        _case(block, rows, stream, mode.split())
        for block in BLOCKS
        for rows, stream in (("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp32"))
        for mode in ("norm", "y", "y norm", "y post_norm", "y post_norm norm")
    ]


def _case(block: int, rows: str, stream: str, given: list[str]) -> CompileCase:
    signature = {"residual": f"*{stream}", "hidden": "i32", "eps": "fp32"}
    absent = {name: None for name in ("y", "post_norm", "norm") if name not in given}
    signature |= dict.fromkeys(given, f"*{rows}")
    if "norm" in given:
        signature["out"] = f"*{rows}"
    else:
        absent["out"] = None
    return CompileCase(
        name=f"add_norm {block} {rows} {stream} {'+'.join(given)}",
        kernel=add_norm_kernel,
        signature=signature,
        constexprs={"BLOCK": block, **absent},
        divisible=tuple(name for name in signature if name != "eps"),
        options=_options(block),
    )


def _options(block: int) -> dict[str, int]:
    """Launch options, a function of the row's width alone, as is the order of a row's sums."""
    options = {"num_warps": min(16, block // VALUES_PER_WARP), "num_stages": 1, "enable_fp_fusion": False}
    # ptxas would rather spill the widest rows than give up a second block beside this one.
    return options | {"maxnreg": WIDEST_REGISTERS} if block == MAX_HIDDEN else options
