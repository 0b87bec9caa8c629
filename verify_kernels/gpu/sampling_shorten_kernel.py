"""Shortens the lists of each row: by its filters, then by the noise's bounds, so that a handful is left to choose of.

One program per row. What is left needs the float64 logarithms of G; what is dropped can not be chosen.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.noise_kernel import gumbel_bounds, noise_bits
from verify_kernels.gpu.sampling_cut_kernel import find_cut
from verify_kernels.gpu.sampling_list_kernel import append, keeps, list_tile
from verify_kernels.gpu.sampling_math_kernel import DEAD, LAST_ID, reach, reached_by, softmax_weight
from verify_kernels.gpu.sampling_scan_kernel import inverse_of, temperature_of


@triton.jit(
    do_not_specialize=[
        "logits", "temperature", "inverse", "seed", "position", "top_k", "top_p", "log_min_p", "peak", "counts",
        "weights", "row_stride", "vocab", "width", "splits",
    ]
)  # fmt: skip
def shorten_kernel(
    logits, temperature, inverse, seed, position, top_k, top_p, log_min_p, peak, places, spare, counts, weights,
    row_stride, vocab, width, splits,
    NOISE: tl.constexpr, FILTERS: tl.constexpr, TOTAL: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rewrites ``places`` and ``counts`` of rows with top-k or top-p, with WIDE of all; with TOTAL, the ``weights`` of
    the former become what their filters leave. spare: as ``places``.
    """
    row = tl.program_id(0)
    heat = temperature_of(temperature, row)
    cut = heat < 0.0
    cut_z, cut_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
    if FILTERS:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        cut = (heat > 0.0) & (((k > 0) & (k < vocab)) | (p < 1.0))
    if WIDE | cut:
        split = tl.arange(0, SPLITS)
        at, line = row * splits + split, logits + row.to(tl.int64) * row_stride
        own, over = places + row.to(tl.int64) * splits * TOKENS, inverse_of(inverse, row)
        listed = tl.where(heat >= 0.0, tl.load(counts + at, mask=split < splits, other=0), 0)
        if FILTERS:  # noqa: SIM102
            if cut:
                z_max = tl.load(peak + row)
                total = tl.sum(tl.load(weights + at, mask=split < splits, other=0), axis=0)
                cut_z, cut_id = find_cut(
                    own, spare + row.to(tl.int64) * splits * TOKENS, listed, line, over, z_max, total, k, p, vocab,
                    TOKENS, SPLITS, COLUMNS,
                )  # fmt: skip
                floor = z_max + tl.load(log_min_p + row)
                cut_id = tl.where(floor > cut_z, LAST_ID, cut_id)
                cut_z = tl.maximum(cut_z, floor)
                if TOTAL:
                    total = _weight_of(own, listed, line, over, z_max, cut_z, cut_id, TOKENS, SPLITS, COLUMNS)
                    tl.store(weights + at, tl.where(split == 0, total, 0), mask=split < splits)
        key, where = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if NOISE:
            key, where = tl.load(seed + row), tl.load(position + row)
        listed = _narrow(
            own, listed, line, over, heat, key, where, cut_z, cut_id, width, NOISE, TOKENS, SPLITS, COLUMNS
        )  # fmt: skip
        tl.store(counts + at, listed, mask=split < splits)


@triton.jit
def _weight_of(
    places, counts, row, inverse, z_max, cut_z, cut_id,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Weight of what the cut leaves."""
    total = tl.full((), 0, tl.int64)
    for column in range(0, tl.max(counts, axis=0), COLUMNS):
        present, token, z = list_tile(places, counts, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        total += tl.sum(tl.where(present & keeps(z, token, cut_z, cut_id), softmax_weight(z - z_max), 0))
    return total


@triton.jit
def _narrow(
    places, counts, row, inverse, heat, seed, position, cut_z, cut_id, width,
    NOISE: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keep the tokens that the cut leaves and that may be among the best ``width``: the counts that are left."""
    best = tl.full((SPLITS, COLUMNS), DEAD, tl.float32)
    for column in range(0, tl.max(counts, axis=0), COLUMNS):
        present, token, z = list_tile(places, counts, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        low, _ = _bounds(z, token, heat, seed, position, NOISE)
        kept = present & keeps(z, token, cut_z, cut_id)
        best = tl.maximum(best, tl.where(kept, low, DEAD))
    least = reach(reached_by(best, width))
    left = tl.zeros_like(counts)
    for column in range(0, tl.max(counts, axis=0), COLUMNS):
        present, token, z = list_tile(places, counts, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        _, high = _bounds(z, token, heat, seed, position, NOISE)
        kept = present & keeps(z, token, cut_z, cut_id) & (high >= least)
        left = append(places, left, kept, token, TOKENS, SPLITS)
    return left


@triton.jit
def _bounds(z, token, heat, seed, position, NOISE: tl.constexpr):
    """z + G from below and from above."""
    low, high = z, z
    if NOISE:
        below, above = gumbel_bounds(noise_bits(seed, position, token))
        low, high = tl.where(heat > 0.0, z + below, z), tl.where(heat > 0.0, z + above, z)
    return low, high
