"""The choice among the listed tokens of each row: the best by exact z + G, and log-probabilities."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.noise_kernel import gumbel, noise_bits
from verify_kernels.gpu.sampling_list_kernel import list_tile
from verify_kernels.gpu.sampling_math_kernel import DEAD, LAST_ID, divide, live, log_of_weight
from verify_kernels.gpu.sampling_scan_kernel import inverse_of, temperature_of


@triton.jit(
    do_not_specialize=[
        "logits", "temperature", "inverse", "seed", "position", "peak", "counts", "weights", "tokens", "chosen", "ids",
        "values", "row_stride", "vocab", "width", "splits",
    ]
)  # fmt: skip
def choose_kernel(
    logits, temperature, inverse, seed, position, peak, places, counts, weights, tokens, chosen, ids, values,
    row_stride, vocab, width, splits,
    NOISE: tl.constexpr, TOTAL: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ids: int32 [rows, width], -1 beyond the last; with TOTAL, values: their log-probabilities, float64 [rows, width].

    tokens, chosen: where given, the log-probability of tokens int32 [rows]; float64 [rows]; a row without one (-1)
    has no ids either.
    """
    row = tl.program_id(0)
    heat = temperature_of(temperature, row)
    split = tl.arange(0, SPLITS)
    listed = tl.where(heat >= 0.0, tl.load(counts + row * splits + split, mask=split < splits, other=0), 0)
    line, own = logits + row.to(tl.int64) * row_stride, places + row.to(tl.int64) * splits * TOKENS
    key, where = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if NOISE:
        key, where = tl.load(seed + row), tl.load(position + row)
    z_max, normaliser = tl.full((), DEAD, tl.float32), tl.full((), 0.0, tl.float64)
    if TOTAL:
        z_max = tl.where(heat >= 0.0, tl.load(peak + row), DEAD)
        total = tl.sum(tl.load(weights + row * splits + split, mask=split < splits, other=0), axis=0)
        normaliser = log_of_weight(tl.maximum(total, 1))
    if tokens is not None:
        token = tl.load(tokens + row)
        usable = (token >= 0) & (token < vocab) & (z_max > DEAD)
        listed = tl.where(usable, listed, 0)
        z = live(tl.load(line + token, mask=usable, other=DEAD))
        tl.store(chosen + row, _log_probability(z, z_max, normaliser))
    _write_best(
        own, listed, line, inverse_of(inverse, row), heat, key, where, z_max, normaliser,
        ids, values, row.to(tl.int64) * width, width, NOISE, TOTAL, WIDE, TOKENS, SPLITS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _log_probability(z, z_max, normaliser):
    """float64, never -0; -inf of a dead logit."""
    value = (z.to(tl.float64) - z_max.to(tl.float64)) - normaliser + 0.0
    return tl.where(z > DEAD, value, DEAD)


@triton.jit
def _scores(
    places, counts, column, row, inverse, heat, seed, position,
    NOISE: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's exact z + G and its tokens; -inf where there is none."""
    present, token, z = list_tile(places, counts, column, row, inverse, TOKENS, SPLITS, COLUMNS)
    if NOISE:
        z = tl.where(heat > 0.0, z + gumbel(noise_bits(seed, position, token)), z)
    return tl.where(present, z, DEAD), token


@triton.jit
def _better(score, token, best, best_id):
    """The better of a tile's best and ``best``: the larger score, the lower id among equals."""
    top = tl.max(score)
    top_id = tl.min(tl.where((score == top) & (score > DEAD), token, LAST_ID))
    wins = (top > best) | ((top == best) & (top_id < best_id))
    return tl.where(wins, top, best), tl.where(wins, top_id, best_id)


@triton.jit
def _write_best(
    places, counts, row, inverse, heat, seed, position, z_max, normaliser, ids, values, out, width,
    NOISE: tl.constexpr, TOTAL: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The best ``width`` one after the other: each is the best of those after the one before."""
    most = tl.max(counts, axis=0)
    if WIDE:
        first, first_token = _scores(
            places, counts, 0, row, inverse, heat, seed, position, NOISE, TOKENS, SPLITS, COLUMNS
        )  # fmt: skip
        last, last_id = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
        for i in range(width):
            best, best_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
            score = tl.where(_after(first, first_token, last, last_id), first, DEAD)
            best, best_id = _better(score, first_token, best, best_id)
            for column in range(COLUMNS, most, COLUMNS):  # rarely any: first tiles hold most lists
                score, token = _scores(
                    places, counts, column, row, inverse, heat, seed, position, NOISE, TOKENS, SPLITS, COLUMNS
                )  # fmt: skip
                score = tl.where(_after(score, token, last, last_id), score, DEAD)
                best, best_id = _better(score, token, best, best_id)
            last, last_id = best, best_id
            found = best > DEAD
            tl.store(ids + out + i, tl.where(found, best_id, -1))
            if TOTAL:
                z = tl.load(row + best_id, mask=found, other=DEAD)
                z = divide(live(z), inverse)
                tl.store(values + out + i, _log_probability(z, z_max, normaliser))
    else:
        best, best_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
        for column in range(0, most, COLUMNS):
            score, token = _scores(
                places, counts, column, row, inverse, heat, seed, position, NOISE, TOKENS, SPLITS, COLUMNS
            )  # fmt: skip
            best, best_id = _better(score, token, best, best_id)
        tl.store(ids + out, tl.where(best > DEAD, best_id, -1))


@triton.jit
def _after(score, token, last, last_id):
    """Whether a token comes after the last one taken, by falling score and rising id."""
    return (score < last) | ((score == last) & (token > last_id))
