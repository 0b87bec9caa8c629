"""The noise: published test vectors, native against numpy, and its distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.core.sampling.natives import native_sampling
from verify_kernels.noise import (
    fixed_exp,
    fixed_log,
    gumbel,
    gumbel_from_bits,
    log_of_weight,
    noise_bits,
    philox4x32,
    softmax_weights,
)
from verify_kernels.sampling import RowSampling, SamplingPolicy

U64 = st.integers(0, 2**64 - 1)

# Published outputs of Philox4x32-10 from the Random123 distribution: (counter, key, result).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_matches_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    assert tuple(philox4x32(np.asarray([counter], np.uint32), key)[0].tolist()) == result


def test_four_tokens_share_a_call_keyed_by_seed_and_position() -> None:
    seed, position = 0x0123456789ABCDEF, 0x1122334455667788
    counter = np.asarray([[0x55667788, 0x11223344, 1, 0]], np.uint32)
    lanes = philox4x32(counter, (0x89ABCDEF, 0x01234567))[0]
    assert noise_bits(seed, position, np.arange(4, 8)).tolist() == lanes.tolist()


@settings(max_examples=30)
@given(U64, st.integers(0, 2**63 - 1), st.integers(2, 700))
def test_native_noise_decides_like_the_reference_near_ties(seed: int, position: int, vocab: int) -> None:
    """In each row the first token and one other are alive, a few steps of float32 from a tie by their noise."""
    first, *noise = gumbel(seed, position, np.arange(vocab))
    others = np.arange(1, vocab)
    tie = first - np.asarray(noise)
    rows = [RowSampling(SamplingPolicy(seed=seed), position)] * len(others)
    for steps in range(-2, 3):
        logits = np.full((len(others), vocab), -np.inf, np.float32)
        logits[:, 0] = 0
        logits[others - 1, others] = alive = tie + steps * np.spacing(np.maximum(np.abs(tie), np.abs(first)))
        expected = np.where(alive + noise > first, others, 0)
        assert native_sampling().sample(torch.from_numpy(logits), rows).tolist() == expected.tolist()


def test_noise_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    whole = gumbel(7, 3, np.arange(1000))
    assert gumbel(7, 3, np.asarray([999, 0, 17, 17])).tolist() == whole[[999, 0, 17, 17]].tolist()


GOLDEN = (
    "0x1.c0eae00000000p-2",
    "0x1.c9e3520000000p-1",
    "-0x1.7c3c040000000p-4",
    "0x1.abd2720000000p-1",
    "-0x1.6cf6d40000000p-5",
    "-0x1.65d2f00000000p-3",
)


def test_noise_is_the_same_on_every_machine() -> None:
    """Golden values: changing them changes the text of every stored seed."""
    values = gumbel(42, 10, np.asarray([0, 1, 2, 3, 4, 151935]))
    assert tuple(float(v).hex() for v in values) == GOLDEN


def test_noise_is_finite_at_both_ends_and_matches_the_formula() -> None:
    bits = np.asarray([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    expected = [-math.log(-math.log((b + 0.5) / 2**32)) for b in bits.tolist()]
    assert np.allclose(gumbel_from_bits(bits), expected, rtol=1e-6, atol=0)


def test_noise_follows_the_gumbel_distribution_over_tokens_positions_and_seeds() -> None:
    tokens = gumbel(1, 1, np.arange(40_000))
    positions = np.concatenate([gumbel(1, p, np.arange(4)) for p in range(3000)])
    seeds = np.concatenate([gumbel(s, 1, np.arange(4)) for s in range(3000)])
    assert min(stats.kstest(x, "gumbel_r").pvalue for x in (tokens, positions, seeds)) > 1e-4


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    base = gumbel(1, 1, np.arange(40_000))
    others = [gumbel(1, 2, np.arange(40_000)), gumbel(2, 1, np.arange(40_000)), np.roll(base, 1), np.roll(base, 4)]
    correlations = [abs(np.corrcoef(base, other)[0, 1]) for other in others]
    assert max(correlations) < 4.5 / math.sqrt(40_000)


@settings(max_examples=200)
@given(st.floats(1e-300, 1e300))
def test_fixed_log_is_a_logarithm(x: float) -> None:
    assert math.isclose(float(fixed_log(np.asarray([x]))[0]), math.log(x), rel_tol=2e-15, abs_tol=1e-300)


@settings(max_examples=200)
@given(st.floats(-40, 0, width=32))
def test_fixed_exp_is_an_exponential(d: float) -> None:
    assert math.isclose(float(fixed_exp(np.asarray([d], np.float32))[0]), math.exp(d), rel_tol=2e-7)


def test_weights_are_bounded() -> None:
    d = np.asarray([0.0, -30.0, -31.0, -1e30, -np.inf], np.float32)
    weights = softmax_weights(d).tolist()
    assert weights[0] == 2**44
    assert weights[1] == pytest.approx(math.exp(-30) * 2**44, abs=1)
    assert weights[2:] == [0, 0, 0]
    assert log_of_weight(2**44) == pytest.approx(0, abs=1e-14)
