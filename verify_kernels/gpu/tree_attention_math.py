"""The arithmetic of tree attention: what a tile of keys adds to a running softmax, and how two softmaxes become one."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

NONE = tl.constexpr(float("-inf"))


@triton.jit
def weigh(q, k, seen, peak, factor, MASKED: tl.constexpr):
    """Weights of a tile's keys relative to the running peak of raw scores, and what shrinks all before them.

    q [rows, dim], k [lanes, dim]; seen [rows, lanes] where MASKED; peak [rows], raw; factor: scale * log2(e).
    Returns the new peak, weights [rows, lanes] and shrink [rows]. A row that sees nothing keeps its state bit by bit.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if MASKED:
        scores = tl.where(seen, scores, NONE)
    highest = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(highest == NONE, 0.0, highest)  # -inf - -inf is no number
    # Written as fma: kernels compile without fusion, so that the same source has the same roundings everywhere.
    weights = tl.exp2(tl.fma(scores, factor, -(base * factor)[:, None]))
    return highest, weights, tl.exp2((peak - base) * factor)


@triton.jit
def add_values(weights, shrink, v, total, acc, OPERAND: tl.constexpr):
    """total [rows] and acc [rows, dim] with the tile's weights and weighted values v [lanes, dim] added."""
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(OPERAND), v.to(OPERAND), acc * shrink[:, None], input_precision="ieee")
    return total, acc


@triton.jit
def fold(peak, total, acc, peak_2, total_2, acc_2, factor):
    """Two softmaxes over different keys as one: peak, total [rows], acc [rows, dim].

    Folding an empty one in (peak -inf, zeros) changes no bit.
    """
    highest = tl.maximum(peak, peak_2)
    base = tl.where(highest == NONE, 0.0, highest)
    shrink = tl.exp2((peak - base) * factor)
    shrink_2 = tl.exp2((peak_2 - base) * factor)
    total = tl.fma(total, shrink, total_2 * shrink_2)
    acc = tl.fma(acc, shrink[:, None], acc_2 * shrink_2[:, None])
    return highest, total, acc
