"""The noise on the device: bit-identical to the CPU's for any tokens, with bounds that hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.gpu.sampling_math import NOISE_MARGIN, gumbel, gumbel_bounds, noise_bits_of_run
from verify_kernels.gpu.sampling_math import fixed_log as device_log
from verify_kernels.gpu.sampling_math import noise_bits as device_bits
from verify_kernels.noise import fixed_log, gumbel_from_bits, noise_bits
from verify_kernels.noise import gumbel as true_gumbel

U64 = st.integers(0, 2**64 - 1)
BLOCK = 1024


@triton.jit
def gumbel_kernel(seed, position, tokens, noise, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < n, other=0)
    key = tl.load(seed + at, mask=at < n, other=0)
    where = tl.load(position + at, mask=at < n, other=0)
    tl.store(noise + at, gumbel(device_bits(key, where, token)), mask=at < n)


@triton.jit
def of_bits_kernel(bits, noise, low, high, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + at).to(tl.uint32, bitcast=True)
    below, above = gumbel_bounds(word)
    tl.store(noise + at, gumbel(word))
    tl.store(low + at, below)
    tl.store(high + at, above)


@triton.jit
def run_kernel(seed, position, first, bits, COUNT: tl.constexpr):
    word = noise_bits_of_run(tl.load(seed), tl.load(position), first, COUNT)
    tl.store(bits + tl.arange(0, COUNT), word.to(tl.int32, bitcast=True))


@triton.jit
def log_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, device_log(tl.load(x + at)))


def words(values: NDArray[np.uint64], device: torch.device) -> Tensor:
    return torch.from_numpy(values.view(np.int64)).to(device)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_noise_is_the_cpus_bit_by_bit(device: torch.device, entropy: int) -> None:
    rng = np.random.default_rng(entropy)
    seeds = rng.integers(0, 2**64, 50, dtype=np.uint64)
    positions = rng.integers(0, 2 ** int(rng.integers(1, 64)), 50).astype(np.uint64)
    tokens = rng.integers(0, 2**18, 50).astype(np.int32)
    noise = torch.zeros(50, device=device)
    gumbel_kernel[(1,)](
        words(seeds, device), words(positions, device), torch.from_numpy(tokens).to(device), noise, 50,
        BLOCK=64, enable_fp_fusion=False,
    )  # fmt: skip
    expected = [
        true_gumbel(int(s), int(p), np.asarray([t]))[0] for s, p, t in zip(seeds, positions, tokens, strict=True)
    ]
    assert noise.cpu().numpy().tobytes() == np.asarray(expected, np.float32).tobytes()


@settings(max_examples=15)
@given(U64, U64, st.integers(0, 2**16 - 1))
def test_a_run_of_tokens_has_their_bits(device: torch.device, seed: int, position: int, call: int) -> None:
    bits = torch.zeros(64, dtype=torch.int32, device=device)
    key, where = (words(np.asarray([value], np.uint64), device) for value in (seed, position))
    run_kernel[(1,)](key, where, 4 * call, bits, COUNT=64)
    expected = noise_bits(seed, position, np.arange(4 * call, 4 * call + 64))
    assert bits.cpu().numpy().tobytes() == expected.tobytes()


def test_arbitrary_bits_give_the_cpus_noise_within_the_bounds(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    ends = np.arange(20 * BLOCK, dtype=np.uint32)
    near_one = (2.0**32 - 2.0 ** rng.uniform(0, 32, 20 * BLOCK)).astype(np.uint32)
    middle = rng.integers(0, 2**32, 60 * BLOCK, dtype=np.uint32)
    bits = np.concatenate([ends, ~ends, near_one, middle])
    noise, low, high = (torch.zeros(bits.size, device=device) for _ in range(3))
    given_bits = torch.from_numpy(bits.view(np.int32)).to(device)
    of_bits_kernel[(bits.size // BLOCK,)](given_bits, noise, low, high, BLOCK=BLOCK, enable_fp_fusion=False)
    expected = gumbel_from_bits(bits)
    assert noise.cpu().numpy().tobytes() == expected.tobytes()
    below, above = low.cpu().numpy().astype(np.float64), high.cpu().numpy().astype(np.float64)
    assert (below - NOISE_MARGIN.value < expected).all()
    assert (expected < above + NOISE_MARGIN.value).all()
    winners = expected > 8
    assert (above - below)[winners].max() < 2e-3  # else lists of tokens that may win are long


@pytest.mark.parametrize(("low", "high"), [(2.0**-33, 1.0), (1e-10, 23.0), (1.0, 2.0**63)])
def test_log_equals_the_cpus(device: torch.device, low: float, high: float) -> None:
    x = np.exp(np.random.default_rng(2).uniform(np.log(low), np.log(high), 4 * BLOCK))
    x[:3] = low, high, np.sqrt(0.5)
    out = torch.zeros(x.size, dtype=torch.float64, device=device)
    log_kernel[(4,)](torch.from_numpy(x).to(device), out, BLOCK=BLOCK, enable_fp_fusion=False)
    assert out.cpu().numpy().tobytes() == fixed_log(x).tobytes()
