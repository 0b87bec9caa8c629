"""log and exp from IEEE additions, multiplications and divisions only, so that every machine gets the same bits.

A C library's log differs by a unit in the last place from the next one's, and numpy's vector log from both; a seed
would then mean another text on another machine. The native twins are in ``cpu/csrc/sampling_math.h``, operation by
operation the same.
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
_LOWEST = np.float32(-40.0)  # exp(-40) * 2^44 < 1: what lies below weighs nothing
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
