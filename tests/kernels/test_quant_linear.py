"""Linear layers with weights in blocks: the same bits from every kernel in every batch."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from tests.kernels.natives import native_backend
from verify_kernels.backend import Backend, LinearSpec
from verify_kernels.backend_selection import self_test
from verify_kernels.packed_weights import PackedLinear, StackedLinear, pack_block_linear, pack_linear, unpack_linear
from verify_kernels.quant_formats import FORMATS, sample_blocks
from verify_kernels.reference.backend import ReferenceBackend, fused

ROWS = 70  # more than any kernel multiplies in one panel
_TYPES = gguf.GGMLQuantizationType


def raw_blocks(kind: str, n: int, k: int) -> np.ndarray:
    return sample_blocks(kind, n, k, np.random.default_rng(n + k))


def packed_blocks(kind: str, n: int, k: int) -> PackedLinear:
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    return pack_block_linear(torch.from_numpy(raw_blocks(kind, n, k)), bias, kind, k)  # type: ignore[arg-type]


def make_inputs(k: int) -> torch.Tensor:
    x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(2))
    x[:, 3] *= 30  # an outlier channel, as real activations have
    x[1, :64] = 0  # and a group without a peak
    return x


def run_linear(backend: Backend, weight: PackedLinear | StackedLinear, x: torch.Tensor, rows: int) -> torch.Tensor:
    dst = torch.zeros(ROWS, weight.n)
    backend.reserve(ROWS, 1536, 64)
    backend.bind(LinearSpec(weight, x.clone(), dst))(rows)
    return dst[:rows]


def _shapes(kind: str) -> list[tuple[int, int]]:
    return (
        [(64, 256), (70, 1536), (40, 512)]
        if FORMATS[kind].block == 256
        else [(64, 256), (70, 576), (40, 32), (33, 608)]
    )


QUANT_CASES = [(kind, n, k) for kind in FORMATS for n, k in _shapes(kind)]


@pytest.mark.parametrize(("kind", "n", "k"), QUANT_CASES)
def test_repacking_is_lossless(kind: str, n: int, k: int) -> None:
    raw = raw_blocks(kind, n, k)
    own = {"u4": _u4, "q3": _q3}.get(kind[:2])
    stored = own(kind, raw)[:, :k] if own else gguf.dequantize(raw, _TYPES[kind.upper()])
    assert torch.equal(unpack_linear(packed_blocks(kind, n, k)), torch.from_numpy(stored))


def _q3(kind: str, raw: np.ndarray) -> np.ndarray:
    """scale * (level - 4), the levels of a block being one number of 96 bits."""
    blocks = raw.reshape(-1, FORMATS[kind].block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    whole = [int.from_bytes(block[2:].tobytes(), "little") for block in blocks]
    levels = np.array([[number >> 3 * i & 7 for i in range(32)] for number in whole], np.float32)
    return ((levels - 4) * scale).reshape(len(raw), -1)


def _u4(kind: str, raw: np.ndarray) -> np.ndarray:
    """scale * (level - zero point), block by block."""
    blocks = raw.reshape(len(raw), -1, FORMATS[kind].block_bytes)
    scale = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    levels = np.stack((blocks[..., 3:] % 16, blocks[..., 3:] // 16), axis=-1).reshape(*blocks.shape[:2], -1)
    return ((levels.astype(np.float32) - blocks[..., 2:3]) * scale).reshape(len(raw), -1)


@pytest.mark.parametrize("kind", ["q4_k", "u4_128"])
def test_inputs_in_a_permuted_order(kind: str) -> None:
    k = 768
    plain, x = packed_blocks(kind, 40, k), make_inputs(k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3)).int()
    mixed = replace(plain, order=order)
    assert torch.equal(unpack_linear(mixed)[:, order], unpack_linear(plain))
    for backend in (native_backend(), ReferenceBackend(1)):
        assert torch.equal(run_linear(backend, mixed, x, 5), run_linear(backend, plain, x[:, order], 5))


@pytest.mark.parametrize(("kind", "n", "k"), QUANT_CASES)
def test_native_equals_reference_bit_for_bit_in_every_batch(kind: str, n: int, k: int) -> None:
    weight, x, backend = packed_blocks(kind, n, k), make_inputs(k), native_backend()
    expected = run_linear(ReferenceBackend(1), weight, x, ROWS)
    exact = x.double() @ unpack_linear(weight).double().t() + weight.bias[:n].double()  # type: ignore[index]
    assert (expected - exact).norm() < 0.03 * exact.norm()
    for rows in range(1, ROWS + 1):
        assert torch.equal(run_linear(backend, weight, x, rows), expected[:rows]), rows
    assert torch.equal(run_linear(backend, weight, x[17:].repeat(2, 1)[:ROWS], 1), expected[17:18])


def test_parts_of_several_kinds_are_one_layer() -> None:
    x = make_inputs(512)
    parts = (
        packed_blocks("q4_k", 40, 512),
        packed_blocks("q6_k", 24, 512),
        pack_linear(torch.randn(8, 512), None, "int8"),
    )
    for backend in (native_backend(), ReferenceBackend(1)):
        whole = run_linear(backend, StackedLinear(parts), x, 5)
        assert torch.equal(whole, torch.cat([run_linear(backend, part, x, 5) for part in parts], dim=1))


def test_self_test_covers_the_formats() -> None:
    assert self_test(native_backend(), "auto") == "bitwise"


def test_fused_rounds_once() -> None:
    """If the double is first rounded to a tie, rounding it again goes the wrong way."""
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)  # the product is 1 + 2^-11 + 2^-24: a tie between floats
    for third, expected in ((2.0**-60, 1 + 2**-11 + 2**-23), (-(2.0**-60), 1 + 2**-11), (0.0, 1 + 2**-11)):
        got = fused(np.array([a]), np.array([b]), np.array([third], np.float32))
        assert got[0] == np.float32(expected)
