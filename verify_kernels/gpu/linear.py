# mypy: disallow-untyped-defs=False

"""Batch-invariant linear layer in 16 bits or fp8: a row's bits depend neither on other rows nor on their number."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_previous, chip_of, exchange, launch_options
from verify_kernels.gpu.linear_plan import (
    DENSE_KINDS,
    FAMILIES,
    LinearLaunch,
    LinearWorkspace,
    launches,
    linear_case,
    plan_launch,
    tiles_of,
)

# Values of splits on their way to a program at a time. They go to the shared memory that the products took, 96 KiB and
# more for all but the smallest tiles.
_AHEAD = tl.constexpr(24576)


@triton.jit
def store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n):
    """Store ``total`` [columns, rows], scaled, plus bias and residual. ``residual`` may be ``out``."""
    inside_n, inside_m = offs_n < n, offs_m < rows
    inside = inside_m[:, None] & inside_n[None, :]
    at = offs_m[:, None].to(tl.int64) * n + offs_n[None, :]
    y = tl.trans(total)
    extra = tl.zeros(y.shape, tl.float32)
    if bias is not None:
        extra += tl.load(bias + offs_n, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        extra += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if w_scale is not None:
        y *= tl.load(w_scale + offs_n, mask=inside_n, other=0.0)[None, :]
        rowwise = tl.load(x_scale + offs_m, mask=inside_m, other=0.0)[:, None]
        y = tl.fma(y, tl.broadcast_to(rowwise, y.shape), extra)  # said, so that no compiler may choose per tile
    else:
        y += extra
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_partial(own, partial, counter, SPLIT_K: tl.constexpr):
    """Split-K: store a split's sum [columns, rows] in ``partial`` [splits, tiles, columns, rows]; True for the program
    that comes last of its tile. Which program that is varies; its operands and their order do not."""
    columns: tl.constexpr = own.shape[0]
    block_m: tl.constexpr = own.shape[1]
    at = _within(columns, block_m)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    slot = (tl.program_id(1) * tiles + tile).to(tl.int64) * (columns * block_m)
    tl.store(partial + slot + at, own)
    exchange()  # the counter is raised by one thread, after what all of them wrote
    arrived = tl.atomic_add(counter + tile, 1, sem="acq_rel", scope="gpu")
    return arrived == SPLIT_K - 1


@triton.jit
def reduce_splits(partial, counter, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT_K: tl.constexpr):
    """The tile's partial sums, added in the order of the splits; the counter is ready for the next launch."""
    at = partial + _within(COLUMNS, BLOCK_M)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    total = tl.zeros((COLUMNS, BLOCK_M), tl.float32)
    room: tl.constexpr = _AHEAD // (COLUMNS * BLOCK_M)
    ahead: tl.constexpr = SPLIT_K if room > SPLIT_K else room
    # One by one, each would cost the memory's latency. Loads into registers are no help: ptxas moves them down to where
    # they are needed, to save registers.
    for split in tl.range(0, tl.num_programs(1), num_stages=1 + ahead):
        slot = (split * tiles + tile).to(tl.int64) * (COLUMNS * BLOCK_M)
        total += tl.load(at + slot, cache_modifier=".cg")
    tl.store(counter + tile, 0)
    return total


@triton.jit
def _within(COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr):
    return tl.arange(0, COLUMNS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]


@triton.jit
def _products(
    x, w, offs_m, offs_n, rows, n, k, split, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, EVEN_K: tl.constexpr
):
    """One split's sum [columns, rows]. Columns beyond n read the last one's weights and are never stored."""
    offs_k = tl.arange(0, BLOCK_K)
    weights = w + tl.minimum(offs_n, n - 1)[:, None].to(tl.int64) * k + offs_k[None, :]
    inputs = x + offs_m[:, None].to(tl.int64) * k + offs_k[None, :]
    row = (offs_m < rows)[:, None]
    blocks = tl.cdiv(k, BLOCK_K)
    share = tl.cdiv(blocks, SPLIT_K)
    total = tl.zeros((offs_n.shape[0], offs_m.shape[0]), tl.float32)
    for block in range(tl.minimum(split * share, blocks), tl.minimum(split * share + share, blocks)):
        start = block * BLOCK_K
        if EVEN_K:
            a = tl.load(weights + start)
            b = tl.load(inputs + start, mask=row, other=0.0)
        else:
            inside = (offs_k < k - start)[None, :]
            a = tl.load(weights + start, mask=inside, other=0.0)
            b = tl.load(inputs + start, mask=row & inside, other=0.0)
        # fp8 sums are carried in full float32 from block to block, where Hopper's own accumulator keeps fewer bits
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee", max_num_imprecise_acc=BLOCK_K)
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, w, out, bias, residual, x_scale, w_scale, partial, counter, rows, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    IN_SEQUENCE: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Program (tile, split); see `verify_kernels.gpu.linear_plan`."""
    m_tiles = tl.cdiv(rows, BLOCK_M)
    offs_m = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    await_previous()
    if SPLIT_K == 1:
        total = _products(x, w, offs_m, offs_n, rows, n, k, 0, BLOCK_K, SPLIT_K, EVEN_K)
        store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n)
    elif IN_SEQUENCE:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLIT_K):
            total += _products(x, w, offs_m, offs_n, rows, n, k, split, BLOCK_K, SPLIT_K, EVEN_K)
        store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n)
    else:
        own = _products(x, w, offs_m, offs_n, rows, n, k, tl.program_id(1), BLOCK_K, SPLIT_K, EVEN_K)
        if store_partial(own, partial, counter, SPLIT_K):
            total = reduce_splits(partial, counter, BLOCK_N, BLOCK_M, SPLIT_K)
            store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n)


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    scales: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    x: [rows, k]; weight: [n, k] of x's type; bias: [n]; out, residual: [rows, n], may be the same tensor, but not x.
    float32, float16 or bfloat16 each. x and weight may also be float8_e4m3fn, which needs compute capability 9.0; then
    ``scales`` are the factors of x's rows (`verify_kernels.gpu.quantize`) and of the weight's
    (`verify_kernels.gpu.quantized_weights`), float32 [rows] and [n].
    """
    (rows, k), n = x.shape, weight.shape[0]
    launch, chip = plan_launch(rows, n, k, DENSE_KINDS[x.dtype]), chip_of(x.device)
    linear_kernel[launch.grid](
        x, weight, out, bias, residual, *scales, workspace.partials, workspace.counters, rows, n, k,
        **launch.constants(), EVEN_K=k % launch.order.block_k == 0,
        **launch_options(launch.options(chip), chip),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every tile, whole and in splits, with bias and residual.

    Whole 16-bit tiles also with a float32 residual stream and with a k that is no multiple of their block; the
    smallest tile also with a k that is not aligned.
    """
    cases = []
    for kind in ("bf16", "fp16"):
        for launch in launches(kind):
            variants = [("", kind, True, True)]
            if launch.order.split_k == 1:
                variants += [(" to fp32", "fp32", True, True), (" ragged", kind, False, True)]
                if launch.tile == tiles_of(kind)[0]:
                    variants.append((" odd", kind, False, False))
            cases += [
                _case(kind + suffix, kind, kind, stream, launch, family, even, aligned)
                for suffix, stream, even, aligned in variants
                for family in FAMILIES
            ]
        cases += [
            _case(f"fp8 to {kind}", "fp8e4nv", kind, kind, launch, family)
            for launch in launches("fp8")
            for family in FAMILIES
            if family != "amd"
        ]
    return cases


def _case(
    name: str, operand: str, bias: str, stream: str, launch: LinearLaunch, family: str, even: bool = True,
    aligned: bool = True,
) -> CompileCase:  # fmt: skip
    pointers = {"x": operand, "w": operand, "out": stream, "bias": bias, "residual": stream}
    unscaled = {} if operand == "fp8e4nv" else dict.fromkeys(("x_scale", "w_scale"))
    return linear_case(
        name, linear_kernel, launch, family, aligned=aligned, pointers=pointers, constants={"EVEN_K": even} | unscaled
    )
