"""x W^T of 16-bit, 32-bit or fp8 operands, the weight as the first operand of the tensor core's product."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.linear_finish_kernel import post_split, store_tile, sum_splits


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
    x,
    w,
    out,
    bias,
    residual,
    x_scale,
    w_scale,
    partial,
    counter,
    rows,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IN_SEQUENCE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Program (tile, split); see `verify_kernels.gpu.linear_launch`."""
    m_tiles = tl.cdiv(rows, BLOCK_M)
    offs_m = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
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
        if post_split(own, partial, counter, SPLIT_K):
            total = sum_splits(partial, counter, BLOCK_N, BLOCK_M, SPLIT_K)
            store_tile(total, out, bias, residual, x_scale, w_scale, offs_m, offs_n, rows, n)
