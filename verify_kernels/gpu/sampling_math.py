# mypy: disallow-untyped-defs=False

"""Arithmetic of the sampling kernels: the coupled noise, the order of logits, integer weights, lists of tokens.

Noise and weights are those of ``verify_kernels/noise.py``, bit by bit. Compile with ``enable_fp_fusion=False``: a fused
multiply-add would be another rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from verify_kernels.gpu.kernel_launch import exchange

LN2 = tl.constexpr(0.6931471805599453)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_ROUND_EVEN = tl.constexpr(0xD2511F53)
_ROUND_ODD = tl.constexpr(0xCD9E8D57)
_WEYL_LOW = tl.constexpr(0x9E3779B9)
_WEYL_HIGH = tl.constexpr(0xBB67AE85)
_MANTISSA = tl.constexpr(0x000FFFFFFFFFFFFF)
_HALF = tl.constexpr(1022 << 52)
_UNIT = tl.constexpr(2.0**-32)
NOISE_MARGIN = tl.constexpr(2.0**-6)  # more than the errors of two `_log_nearly` and of their roundings


@triton.jit
def philox(seed, position, calls):
    """Philox4x32-10 of counter (position, call, 0) and key ``seed``: the four words of each of ``calls``, uint32.

    seed, position: int64 scalars, taken as 64 unsigned bits.
    """
    c0, c1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2 = c0 + tl.zeros_like(calls), c1 + tl.zeros_like(calls), calls
    c3 = tl.zeros_like(calls)
    for _ in tl.static_range(10):
        even, odd = c0.to(tl.uint64) * _ROUND_EVEN, c2.to(tl.uint64) * _ROUND_ODD
        c0, c1 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0, odd.to(tl.uint32)
        c2, c3 = (even >> 32).to(tl.uint32) ^ c3 ^ k1, even.to(tl.uint32)
        k0, k1 = k0 + _WEYL_LOW, k1 + _WEYL_HIGH
    return c0, c1, c2, c3


@triton.jit
def noise_bits_of_run(seed, position, first, COUNT: tl.constexpr):
    """The bits of tokens first .. first + COUNT - 1, ``first`` a multiple of four; uint32 [COUNT]."""
    calls = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    c0, c1, c2, c3 = philox(seed, position, calls)
    return tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))


@triton.jit
def noise_bits(seed, position, tokens):
    """The bits of any ``tokens``, a call for each; uint32 of their shape."""
    c0, c1, c2, c3 = philox(seed, position, (tokens >> 2).to(tl.uint32))
    lane = tokens & 3
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@triton.jit
def fixed_log(x):
    """``noise.fixed_log`` of positive normal float64 ``x``, operation by operation."""
    word = x.to(tl.int64, bitcast=True)
    exponent = (word >> 52) - 1022
    mantissa = ((word & _MANTISSA) | _HALF).to(tl.float64, bitcast=True)
    low = mantissa < _SQRT_HALF
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    power = tl.where(low, exponent - 1, exponent).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * (1.0 / 23.0) + 1.0 / 21.0
    for i in tl.static_range(9):
        series = series * square + 1.0 / (19 - 2 * i)
    twice = s + s
    return power * LN2 + (twice + twice * (square * series))


@triton.jit
def gumbel(bits):
    """G of 32 random bits; float32, the CPU's value."""
    uniform = (bits.to(tl.float64) + 0.5) * _UNIT
    return (-fixed_log(-fixed_log(uniform))).to(tl.float32)


@triton.jit
def gumbel_bounds(bits):
    """A pair between which G lies, `NOISE_MARGIN` aside: log(u / (1 - u)) <= G <= -log(1 - u), u = (bits + 1/2) / 2^32.

    For 1 - u <= -log(u) <= (1 - u) / u. They part by 1 - u: next to nothing for the large values that win.
    """
    high = -_log_of_share((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5)
    return high + _log_of_share(bits.to(tl.float32) + 0.5), high


@triton.jit
def _log_of_share(x):
    """log(x / 2^32) of positive normal float32 ``x`` within 0.0054: by exponent, and a parabola in the mantissa."""
    word = x.to(tl.int32, bitcast=True)
    mantissa = ((word & 0x007FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    straight = tl.fma(word.to(tl.float32), LN2 * 2.0**-23, -(127 + 32) * LN2 - 0.48)
    return tl.fma(mantissa, tl.fma(mantissa, -0.24, 0.72), straight)


DEAD = tl.constexpr(float("-inf"))
LAST_ID = tl.constexpr(0x7FFFFFFF)
WEIGHT_BITS = tl.constexpr(44)
_LIMIT = tl.constexpr(1e30)


@triton.jit
def live(x):
    """-inf where ``x`` is not above -1e30 (NaN too), 1e30 where it is above that."""
    return tl.where(x > -_LIMIT, tl.where(x < _LIMIT, x, _LIMIT), DEAD)


@triton.jit
def divide(x, inverse):
    """x / d, rounded once, of float32 x and d with ``inverse`` = 1 / d in float64.

    x * inverse lies within 2^-52 of the quotient. A number of 25 bits or fewer, and so every point at which rounding
    to float32 turns, is the quotient itself or at least 2^-49 away from it: rounding to 50 bits first sets the former
    right and leaves the latter on its side. (A division instruction calls a function, around which registers spill.)
    """
    word = (x.to(tl.float64) * inverse).to(tl.int64, bitcast=True)
    return ((word + 4) & -8).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def read_logits(row, tokens, present, inverse):
    """z of ``tokens`` of the row that starts at pointer ``row``: live logits over temperature; -inf where absent."""
    return divide(live(tl.load(row + tokens, mask=present, other=DEAD)), inverse)


@triton.jit
def allowed(masks, begin, words, tokens):
    """Whether the bit mask of ``words`` words at ``begin`` has a token; without one (begin < 0) it has all."""
    word = tokens >> 5
    bits = tl.load(masks + begin + word, mask=word < tl.where(begin < 0, 0, words), other=0)
    return tl.where(begin < 0, 1, (bits >> (tokens & 31)) & 1) != 0


@triton.jit
def order_key(z):
    """int32 that orders as float32 ``z`` does, both zeros alike; its own inverse is `value_of_key`."""
    word = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The float32 of an `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def softmax_weight(d):
    """``noise.softmax_weights`` of float32 ``d`` <= 0: exp(d) in units of 2^-44; int64."""
    d = tl.where(d > -40.0, d, -40.0)
    n = (d * 1.4426950408889634 + 12582912.0) - 12582912.0
    r = (d - n * 0.693359375) - n * -2.12194440e-4
    e = r * (1.0 / 5040.0) + 1.0 / 720.0
    e = e * r + 1.0 / 120.0
    e = e * r + 1.0 / 24.0
    e = e * r + 1.0 / 6.0
    e = e * r + 0.5
    e = e * r + 1.0
    e = e * r + 1.0
    scale = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (e * scale * 17592186044416.0).to(tl.int64)


@triton.jit
def log_of_weight(total):
    """``noise.log_of_weight`` of an int64 scalar; float64."""
    return fixed_log(total.to(tl.float64)) - WEIGHT_BITS * LN2


@triton.jit
def reach(bound):
    """What the upper bound of a token's z + G must reach, if the token is to reach a true z + G whose lower bound is
    ``bound``: less by the margins of both bounds and of their roundings to float32."""
    return bound - (2.0 * NOISE_MARGIN + tl.abs(bound) * 2.0**-20)


@triton.jit
def reached_by(values, n):
    """A number that ``n`` of float32 ``values`` reach, less than 2^-10 of its size below the n-th largest; -inf where
    there are fewer above -inf."""
    word = tl.where(values > DEAD, order_key(values).to(tl.uint32, bitcast=True) ^ 0x80000000, 0)
    found, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    for _ in range(20):
        trial = found | bit
        found = tl.where(tl.sum((word >= trial).to(tl.int32)) >= n, trial, found)
        bit = bit >> 1
    return tl.where(found > 0, value_of_key((found ^ 0x80000000).to(tl.int32, bitcast=True)), DEAD)


class RowLists(NamedTuple):
    """How a program reads the lists of a row's tokens, one for each split of the vocabulary: of places within it.

    It is built where it is passed on: in a variable Triton would make int32 values of its constants.
    """

    logits: Any  # pointer to the row's first
    inverse: Any  # 1 / temperature, float64
    TOKENS: tl.constexpr  # of a split
    SPLITS: tl.constexpr  # a power of two
    COLUMNS: tl.constexpr  # entries of each list that are read together


@triton.jit
def list_tile(lists, places, counts, column):
    """Entries column .. column + COLUMNS - 1 of every split's list: whether there is one, its token, its z."""
    split = tl.arange(0, lists.SPLITS)[:, None]
    at = column + tl.arange(0, lists.COLUMNS)[None, :]
    present = at < counts[:, None]
    token = split * lists.TOKENS + tl.load(places + split * lists.TOKENS + at, mask=present, other=0).to(tl.int32)
    return present, token, read_logits(lists.logits, token, present, lists.inverse)


@triton.jit
def append(lists, places, counts, kept, token):
    """Put the ``kept`` of a tile at the ends of the lists; the new counts.

    A list may be shortened in place, as its entries move to where they were or before: hence the barrier, behind
    which all of the tile has been read.
    """
    first = tl.arange(0, lists.SPLITS)[:, None] * lists.TOKENS
    rank = tl.cumsum(kept.to(tl.int32), axis=1) - 1
    exchange()
    tl.store(places + first + counts[:, None] + rank, (token - first).to(tl.int16), mask=kept)
    return counts + tl.sum(kept.to(tl.int32), axis=1)


@triton.jit
def keeps(z, token, cut_z, cut_id):
    """Whether the cut leaves a token: it is before the cut, or at it, by falling z and rising id."""
    return (z > cut_z) | ((z == cut_z) & (token <= cut_id))
