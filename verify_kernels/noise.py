"""The noise that couples plain decode, drafting and verification: Gumbel values, the same on every machine.

Random bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a
counter-based generator: G(seed, position, token) needs no state, so it is the same float32 in any order and batch. log
and exp use IEEE additions, multiplications and divisions only: C libraries' logs differ in the last place, and a seed
would then mean another text on another machine.

The native twins are in ``cpu/csrc/sampling_math.h``, operation by operation the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LN2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
WEIGHT_BITS = 44  # the most likely token weighs 2^44, so 2^18 tokens sum below 2^63
_LN2_HIGH = np.float32(0.693359375)  # nine bits: n * _LN2_HIGH is exact for |n| < 2^15
_LN2_LOW = np.float32(-2.12194440e-4)
_LOG2_E = np.float32(1.4426950408889634)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds to an integer
_LOWEST = np.float32(-40.0)  # exp(-40) * 2^44 < 1: lower values weigh 0
_SCALE = np.float32(2.0**WEIGHT_BITS)


def fixed_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal float64 ``x``; relative error about 2^-52 away from x = 1.

    log(m 2^e) = e ln 2 + 2 artanh(s), s = (m - 1) / (m + 1), m in [sqrt(1/2), sqrt(2)).
    """
    mantissa, exponent = np.frexp(x)
    low = mantissa < SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    power = np.where(low, exponent - 1, exponent).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / 23.0)
    for odd in range(21, 1, -2):
        series = series * square + 1.0 / odd
    twice = s + s
    return power * LN2 + (twice + twice * (square * series))


def fixed_exp(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp(max(d, -40)) for float32 ``d`` <= 0; relative error about 2^-23, exactly 1 at 0."""
    d = np.where(d > _LOWEST, d, _LOWEST)
    n = (d * _LOG2_E + _ROUND) - _ROUND
    r = (d - n * _LN2_HIGH) - n * _LN2_LOW
    series = np.full_like(r, np.float32(1.0 / 5040.0))
    for inverse in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        series = series * r + np.float32(inverse)
    scale = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return series * scale


def softmax_weights(d: NDArray[np.float32]) -> NDArray[np.int64]:
    """exp(d) in units of 2^-44, cut to integers; ``d`` float32 <= 0 (-inf: 0).

    Sums of integers are exact: neither order, tiling nor thread count can change a cumulative probability.
    """
    return (fixed_exp(d) * _SCALE).astype(np.int64)


def log_of_weight(total: int) -> float:
    """Natural logarithm of ``total`` units of 2^-44; float64."""
    return float(fixed_log(np.asarray([float(total)]))[0] - WEIGHT_BITS * LN2)


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: tuple[int, int]) -> NDArray[np.uint32]:
    """Ten rounds over ``counter`` uint32 [..., 4] with a key of two 32-bit words; uint32 [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (odd >> _HALF_WORD) ^ c1 ^ np.uint64(k0), odd & _MASK
        c2, c3 = (even >> _HALF_WORD) ^ c3 ^ np.uint64(k1), even & _MASK
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def noise_bits(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.uint32]:
    """32 random bits per token: lane ``token & 3`` of Philox(key = seed, counter = (position, token >> 2)).

    ``seed`` and ``position`` are unsigned 64-bit, low word first; the counter's fourth word is 0. Four tokens share
    one call, a quarter of the work of a call each.
    """
    tokens = np.asarray(tokens, np.int64)
    calls, index = np.unique(tokens >> 2, return_inverse=True)
    counter = np.zeros((calls.shape[0], 4), np.uint32)
    counter[:, 0] = position & 0xFFFFFFFF
    counter[:, 1] = position >> 32
    counter[:, 2] = calls
    lanes = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return lanes[index.reshape(tokens.shape), tokens & 3]


def gumbel_from_bits(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """-log(-log(u)), u = (bits + 1/2) / 2^32, in float64 and rounded once to float32.

    u is exact in float64 and never 0 or 1. All 32 bits count: with 24 the largest value is 17.3, and the many tokens
    of a large vocabulary whose probability is below 1e-7 would get visibly less than their share.
    """
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return (-fixed_log(-fixed_log(uniform))).astype(np.float32)


def gumbel(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """G(seed, position, token) for each of ``tokens``; float32 of the same shape, within [-3.2, 22.9]."""
    return gumbel_from_bits(noise_bits(seed, position, tokens))
