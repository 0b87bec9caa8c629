"""The coupled noise on the device: the float32 values of ``verify_kernels/noise.py``, bit by bit, and a quick bound.

Compile with ``enable_fp_fusion=False``: a fused multiply-add in `fixed_log` would be another rounding.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

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
    """``fixed_math.fixed_log`` of positive normal float64 ``x``, operation by operation."""
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


@triton.jit
def gumbel_kernel(seed, position, tokens, noise, n, BLOCK: tl.constexpr):
    """G(seed, position, token) of each of ``n`` rows; int64, int64 and int32 [n] to float32 [n]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < n, other=0)
    key = tl.load(seed + at, mask=at < n, other=0)
    where = tl.load(position + at, mask=at < n, other=0)
    tl.store(noise + at, gumbel(noise_bits(key, where, token)), mask=at < n)
