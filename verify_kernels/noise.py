"""The noise that couples plain decode, drafting and verification: Gumbel values from a counter-based generator.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). G(seed, position, token) needs
no state: whoever asks for it, in whatever order and company, gets the same float32. The native twin is
``cpu/csrc/philox.h``; both give the same bits on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from verify_kernels.fixed_math import fixed_log

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
