"""Penalties, bias and bans of rows, written into their logits and taken back afterwards.

Lists, not rows, are what there is to do: a thousand edits cost a thousandth of a copy of the row, and the kernels
that read whole rows need know nothing of them. One program per row, as later steps see what earlier ones wrote.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.sampling_math_kernel import DEAD, divide, live
from verify_kernels.gpu.sampling_pool import SamplingPool

_SEEN = tl.constexpr(SamplingPool.SEEN)
_PATH = tl.constexpr(SamplingPool.PATH)
_BIAS = tl.constexpr(SamplingPool.BIAS)
_BANNED = tl.constexpr(SamplingPool.BANNED)
_BIAS_STEP = tl.constexpr(SamplingPool.BIAS_STEP)
_SAVED = tl.constexpr(SamplingPool.SAVED)
_EDIT_WORDS = tl.constexpr(SamplingPool.EDIT_WORDS)


@triton.jit(
    do_not_specialize=[
        "logits",
        "edits",
        "pool",
        "saved",
        "repetition",
        "inverse_repetition",
        "presence",
        "frequency",
        "row_stride",
        "vocab",
    ]
)
def apply_edits_kernel(
    logits,
    edits,
    pool,
    saved,
    repetition,
    inverse_repetition,
    presence,
    frequency,
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
):
    """Save what the lists name, then write penalties of the base, of the path over them, bias on top, bans last."""
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
    tl.debug_barrier()
    for start in range(0, n_bias, BLOCK):
        token, here = _entries(pool + bias, n_bias, start, vocab, BLOCK)
        x = tl.load(saved_bias + start + tl.arange(0, BLOCK), mask=here, other=0.0)
        tl.store(line + token, live(x), mask=here)
    tl.debug_barrier()
    repeat, over = tl.load(repetition + row), tl.load(inverse_repetition + row)
    once, each = tl.load(presence + row), tl.load(frequency + row)
    _penalise(line, pool + seen, n_seen, saved, repeat, over, once, each, vocab, BLOCK)
    tl.debug_barrier()
    _penalise(line, pool + path, n_path, saved_path, repeat, over, once, each, vocab, BLOCK)
    step = tl.maximum(tl.load(edit + _BIAS_STEP), 1)
    for start in range(0, n_bias, step):  # one by one where a token is biased twice: additions have an order
        tl.debug_barrier()
        token, here = _entries(pool + bias, n_bias, start, vocab, BLOCK)
        here &= tl.arange(0, BLOCK) < step
        value = tl.load(pool + bias + n_bias + start + tl.arange(0, BLOCK), mask=here, other=0)
        x = tl.load(line + token, mask=here, other=0.0) + value.to(tl.float32, bitcast=True)
        tl.store(line + token, x, mask=here)
    tl.debug_barrier()
    for start in range(0, n_banned, BLOCK):
        token, here = _entries(pool + banned, n_banned, start, vocab, BLOCK)
        tl.store(line + token, tl.full((BLOCK,), DEAD, tl.float32), mask=here)


@triton.jit(do_not_specialize=["logits", "edits", "pool", "saved", "row_stride", "vocab"])
def undo_edits_kernel(logits, edits, pool, saved, row_stride, vocab, BLOCK: tl.constexpr):
    """Write back what `apply_edits_kernel` saved."""
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
