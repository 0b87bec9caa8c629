# mypy: disallow-untyped-defs=False

"""Sampling's passes over the whole vocabulary: edits of logits, maxima of groups, the list of possible winners.

Edits are penalties, bias and bans, written into the logits and undone afterwards. A thousand of them cost a thousandth
of a copy of the row, and the kernels that read whole rows need no code for them.

A row is cut into splits of GROUPS x GROUP tokens, one program each. A program lists the tokens of its split that may
still be chosen, as places within the split. `choose_kernel` evaluates listed tokens exactly; all others certainly lose.
So only the weights, which are integers, must be exact here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.kernel_launch import await_previous, exchange, specialised_on
from verify_kernels.gpu.sampling_math import (
    DEAD,
    allowed,
    divide,
    gumbel_bounds,
    live,
    noise_bits_of_run,
    reach,
    reached_by,
    softmax_weight,
)
from verify_kernels.gpu.sampling_table import SamplingPool

_SEEN = tl.constexpr(SamplingPool.SEEN)
_PATH = tl.constexpr(SamplingPool.PATH)
_BIAS = tl.constexpr(SamplingPool.BIAS)
_BANNED = tl.constexpr(SamplingPool.BANNED)
_SAVED = tl.constexpr(SamplingPool.SAVED)
_EDIT_WORDS = tl.constexpr(SamplingPool.EDIT_WORDS)


@specialised_on()
def apply_edits_kernel(
    logits, edits, pool, saved, repetition, inverse_repetition, presence, frequency, row_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Save the listed logits, then apply base penalties, path penalties, bias and bans, in this order."""
    await_previous()
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * row_stride
    edit = edits + row * _EDIT_WORDS
    saved += tl.load(edit + _SAVED)
    seen, n_seen = tl.load(edit + _SEEN), tl.load(edit + _SEEN + 1)
    path, n_path = tl.load(edit + _PATH), tl.load(edit + _PATH + 1)
    bias, n_bias = tl.load(edit + _BIAS), tl.load(edit + _BIAS + 1)
    banned, n_banned = tl.load(edit + _BANNED), tl.load(edit + _BANNED + 1)
    saved_path, saved_bias, saved_banned = saved + n_seen, saved + n_seen + n_path, saved + n_seen + n_path + n_bias

    _save(line, pool + seen, n_seen, saved, vocab, BLOCK)
    _save(line, pool + path, n_path, saved_path, vocab, BLOCK)
    _save(line, pool + bias, n_bias, saved_bias, vocab, BLOCK)
    _save(line, pool + banned, n_banned, saved_banned, vocab, BLOCK)
    exchange()
    for start in range(0, n_bias, BLOCK):
        token, here = _entries(pool + bias, n_bias, start, vocab, BLOCK)
        x = tl.load(saved_bias + start + tl.arange(0, BLOCK), mask=here, other=0.0)
        tl.store(line + token, live(x), mask=here)
    exchange()
    repeat, over = tl.load(repetition + row), tl.load(inverse_repetition + row)
    once, each = tl.load(presence + row), tl.load(frequency + row)
    _penalise(line, pool + seen, n_seen, saved, repeat, over, once, each, vocab, BLOCK)
    exchange()
    _penalise(line, pool + path, n_path, saved_path, repeat, over, once, each, vocab, BLOCK)
    exchange()
    for start in range(0, n_bias, BLOCK):
        token, here = _entries(pool + bias, n_bias, start, vocab, BLOCK)
        value = tl.load(pool + bias + n_bias + start + tl.arange(0, BLOCK), mask=here, other=0)
        x = tl.load(line + token, mask=here, other=0.0) + value.to(tl.float32, bitcast=True)
        tl.store(line + token, x, mask=here)
    exchange()
    for start in range(0, n_banned, BLOCK):
        token, here = _entries(pool + banned, n_banned, start, vocab, BLOCK)
        tl.store(line + token, tl.full((BLOCK,), DEAD, tl.float32), mask=here)


@specialised_on()
def undo_edits_kernel(logits, edits, pool, saved, row_stride, vocab, BLOCK: tl.constexpr):
    """Write back what `apply_edits_kernel` saved."""
    await_previous()
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * row_stride
    edit = edits + row * _EDIT_WORDS
    saved += tl.load(edit + _SAVED)
    for kind in tl.static_range(4):
        begin, n = tl.load(edit + 2 * kind), tl.load(edit + 2 * kind + 1)
        for start in range(0, n, BLOCK):
            token, here = _entries(pool + begin, n, start, vocab, BLOCK)
            x = tl.load(saved + start + tl.arange(0, BLOCK), mask=here, other=0.0)
            tl.store(line + token, x, mask=here)
        saved += n


@triton.jit
def _entries(ids, n, start, vocab, BLOCK: tl.constexpr):
    """Tokens of a part of a list, and which of them the row has."""
    at = start + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < n, other=-1)
    return token, (token >= 0) & (token < vocab)


@triton.jit
def _save(line, ids, n, saved, vocab, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        token, here = _entries(ids, n, start, vocab, BLOCK)
        tl.store(saved + start + tl.arange(0, BLOCK), tl.load(line + token, mask=here, other=0.0), mask=here)


@triton.jit
def _penalise(line, ids, n, saved, repetition, inverse, presence, frequency, vocab, BLOCK: tl.constexpr):
    """From the logit as it was: counts stand behind the list's ids."""
    for start in range(0, n, BLOCK):
        token, here = _entries(ids, n, start, vocab, BLOCK)
        x = live(tl.load(saved + start + tl.arange(0, BLOCK), mask=here, other=0.0))
        count = tl.load(ids + n + start + tl.arange(0, BLOCK), mask=here, other=0)
        y = tl.where(x > 0.0, divide(x, inverse), x * repetition)
        y = y - frequency * count.to(tl.float32)
        tl.store(line + token, tl.where(count > 0, y - presence, y), mask=here)


_FARTHEST = tl.constexpr(31.5)  # exp(-30.5) is below 2^-44: tokens farther below the best weigh nothing


@triton.jit
def temperature_of(temperature, row):
    """A row's temperature: 0 is greedy, as all rows are without a table; below 0 the row is inert."""
    if temperature is None:
        return tl.full((), 0.0, tl.float32)
    else:
        return tl.load(temperature + row)


@triton.jit
def inverse_of(inverse, row):
    """1 / temperature of a row; 1 where it is greedy, as all rows are without temperatures."""
    if inverse is None:
        return tl.full((), 1.0, tl.float64)
    else:
        return tl.load(inverse + row)


@triton.jit
def _read_split(
    logits, row_stride, vocab, inverse, mask_begin, mask_words, pool, first, row,
    MASK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """z of TOKENS tokens from ``first`` on; -inf where masked or beyond the vocabulary."""
    tokens = first + tl.arange(0, TOKENS)
    z = live(tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocab, other=DEAD))
    if inverse is not None:
        own = tl.load(inverse + row)
        if own != 1.0:
            z = divide(z, own)
    if MASK:
        may = allowed(pool, tl.load(mask_begin + row), tl.load(mask_words + row), tokens)
        z = tl.where(may, z, DEAD)
    return z


@triton.jit
def _best_of_groups(x, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The largest of each group; groups are interleaved, so that a split's last tokens are spread over all."""
    return tl.max(tl.reshape(x, (GROUP, GROUPS)), axis=0)


@specialised_on("logits", "maxima", "row_stride", "vocab")
def maxima_kernel(
    logits, temperature, inverse, mask_begin, mask_words, pool, maxima, row_stride, vocab,
    MASK: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The largest z of each group of GROUP tokens; maxima: float32 [rows, splits * GROUPS]."""
    await_previous()
    split, row = tl.program_id(0), tl.program_id(1)
    heat = temperature_of(temperature, row)
    if heat >= 0.0:
        first = split * (GROUPS * GROUP)
        z = _read_split(
            logits, row_stride, vocab, inverse, mask_begin, mask_words, pool, first, row, MASK, GROUPS * GROUP
        )  # fmt: skip
        best = _best_of_groups(z, GROUPS, GROUP)
        at = (row.to(tl.int64) * tl.num_programs(0) + split) * GROUPS
        tl.store(maxima + at + tl.arange(0, GROUPS), best)


@specialised_on("maxima")
def bounds_kernel(
    temperature, top_k, top_p, maxima, peak, bound, blocks, vocab,
    FILTERS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Per row the largest z, and a z below which no token can survive top-k or top-p; float32 [rows] each."""
    await_previous()
    row = tl.program_id(0)
    heat = temperature_of(temperature, row)
    if heat >= 0.0:
        lane = tl.arange(0, BLOCKS)
        best = tl.load(maxima + row.to(tl.int64) * blocks + lane, mask=lane < blocks, other=DEAD)
        z_max = tl.max(best, axis=0)
        tl.store(peak + row, z_max)
        if FILTERS:
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            least = DEAD
            if (k > 0) & (k < vocab):
                least = reached_by(best, k)
            elif p < 1.0:
                least = _mass_bound(best, z_max, p, GROUP)
            tl.store(bound + row, least)


@triton.jit
def _mass_bound(best, z_max, p, GROUP: tl.constexpr):
    """A z so low that the tokens below it hold less than 1 - p of the row.

    A group's tokens weigh no more than its best, and below z_max - d no more than exp(-d); the row weighs no less
    than its groups' best tokens. A tenth of 1 - p covers the roundings here.
    """
    weight = tl.where(best > DEAD, tl.exp(best - z_max), 0.0)
    spare = tl.sum(weight, axis=0) * (0.9 * (1.0 - p)).to(tl.float32)
    near, far = tl.full((), 0.0, tl.float32), tl.full((), _FARTHEST, tl.float32)
    for _ in tl.static_range(8):
        middle = (near + far) * 0.5
        lost = tl.sum(tl.minimum(weight, tl.exp(-middle)), axis=0) * GROUP
        near, far = tl.where(lost <= spare, near, middle), tl.where(lost <= spare, middle, far)
    return z_max - far - tl.abs(z_max) * 2.0**-22


@specialised_on("logits", "places", "row_stride", "vocab")
def scan_kernel(
    logits, temperature, inverse, seed, position, top_k, top_p, log_min_p, mask_begin, mask_words, pool, peak, bound,
    places, counts, weights, row_stride, vocab, width,
    NOISE: tl.constexpr, FILTERS: tl.constexpr, WIDE: tl.constexpr, MASK: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """List the tokens of a split that may be chosen, and weigh the split.

    places: int16 [rows, splits, tokens of a split]; counts: int32 [rows, splits]; weights: int64 [rows, splits], of
    what min-p leaves (of everything under top-p), written only where a later kernel reads it.
    """
    await_previous()
    split, row = tl.program_id(0), tl.program_id(1)
    heat = temperature_of(temperature, row)
    if heat >= 0.0:
        TOKENS: tl.constexpr = GROUPS * GROUP
        first = split * TOKENS
        z = _read_split(
            logits, row_stride, vocab, inverse, mask_begin, mask_words, pool, first, row, MASK, TOKENS
        )  # fmt: skip
        at = row.to(tl.int64) * tl.num_programs(0) + split
        floor = DEAD
        if FILTERS:
            z_max, k, p = tl.load(peak + row), tl.load(top_k + row), tl.load(top_p + row)
            by_k, by_p = (heat > 0.0) & (k > 0) & (k < vocab), (heat > 0.0) & (p < 1.0)
            if by_k | by_p:
                kept = (z > DEAD) & (z >= tl.load(bound + row))
            else:
                floor = tl.where(heat > 0.0, z_max + tl.load(log_min_p + row), DEAD)
                kept = _contenders(z, floor, heat, seed, position, row, first, width, NOISE, WIDE, GROUPS, GROUP)
            if (by_p & (by_k == 0)) | (WIDE & ((by_k | by_p) == 0)):
                _weigh(z, z_max, floor, weights + at)
        else:
            kept = _contenders(z, floor, heat, seed, position, row, first, width, NOISE, WIDE, GROUPS, GROUP)
            if WIDE:
                _weigh(z, tl.load(peak + row), floor, weights + at)
        _list(kept, places + at * TOKENS, counts + at, TOKENS)


@triton.jit
def _list(kept, places, count, TOKENS: tl.constexpr):
    """Write the places that are kept, in rising order; one alone, as it mostly is, without a scan."""
    place, n = tl.arange(0, TOKENS), tl.sum(kept.to(tl.int32), axis=0)
    if n == 1:
        tl.store(places, tl.sum(tl.where(kept, place, 0), axis=0).to(tl.int16))
    else:
        tl.store(places + tl.cumsum(kept.to(tl.int32), axis=0) - 1, place.to(tl.int16), mask=kept)
    tl.store(count, n)


@triton.jit
def _weigh(z, z_max, floor, weights):
    counted = (z > DEAD) & (z >= floor)
    tl.store(weights, tl.sum(tl.where(counted, softmax_weight(z - z_max), 0), axis=0))


@triton.jit
def _contenders(
    z, floor, heat, seed, position, row, first, width,
    NOISE: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tokens that may be among the split's best ``width`` by z + G: those that reach ``width`` others' lower bounds."""
    plays = (z > DEAD) & (z >= floor)
    low, high = z, z
    if NOISE:
        bits = noise_bits_of_run(tl.load(seed + row), tl.load(position + row), first, GROUPS * GROUP)
        below, above = gumbel_bounds(bits)
        share = tl.where(heat > 0.0, 1.0, 0.0)
        low, high = tl.fma(below, share, z), tl.fma(above, share, z)
    low = tl.where(plays, low, DEAD)
    if WIDE:
        sure = reached_by(_best_of_groups(low, GROUPS, GROUP), width)
    else:
        sure = tl.max(low, axis=0)
    return plays & (high >= reach(sure))
