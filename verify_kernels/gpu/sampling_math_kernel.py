"""Device functions that the sampling kernels share: live logits, their order, and integer softmax weights.

Compile with ``enable_fp_fusion=False``: every float operation here is the CPU's, rounding by rounding.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.noise_kernel import LN2, NOISE_MARGIN, fixed_log

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
    """``fixed_math.softmax_weights`` of float32 ``d`` <= 0: exp(d) in units of 2^-44; int64."""
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
    """``fixed_math.log_of_weight`` of an int64 scalar; float64."""
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
