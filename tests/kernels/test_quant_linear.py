"""Linear layers with weights in blocks: the same bits from every kernel in every batch."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from tests.kernels.natives import backend_for, native_backend
from tests.kernels.test_instruction_sets import AVX2, BASELINE, can_run
from verify_kernels.backend import Backend, LinearSpec
from verify_kernels.backend_selection import self_test
from verify_kernels.packed_weights import PackedLinear, StackedLinear, pack_block_linear, pack_linear, unpack_linear
from verify_kernels.quant_formats import FORMATS, sample_blocks
from verify_kernels.reference.backend import ReferenceBackend, fused

ROWS = 70  # more than any kernel multiplies in one panel
_TYPES = gguf.GGMLQuantizationType


def _raw(kind: str, n: int, k: int) -> np.ndarray:
    return sample_blocks(kind, n, k, np.random.default_rng(n + k))


def _packed(kind: str, n: int, k: int) -> PackedLinear:
    bias = torch.randn(n, generator=torch.Generator().manual_seed(1))
    return pack_block_linear(torch.from_numpy(_raw(kind, n, k)), bias, kind, k)  # type: ignore[arg-type]


def _inputs(k: int) -> torch.Tensor:
    x = torch.randn(ROWS, k, generator=torch.Generator().manual_seed(2))
    x[:, 3] *= 30  # an outlier channel, as real activations have
    x[1, :64] = 0  # and a group without a peak
    return x


def _run(backend: Backend, weight: PackedLinear | StackedLinear, x: torch.Tensor, rows: int) -> torch.Tensor:
    dst = torch.zeros(ROWS, weight.n)
    backend.reserve(ROWS, 1536, 64)
    backend.linear(LinearSpec(weight, x.clone(), dst))(rows)
    return dst[:rows]


def _shapes(kind: str) -> list[tuple[int, int]]:
    return (
        [(64, 256), (70, 1536), (40, 512)]
        if FORMATS[kind].block == 256
        else [(64, 256), (70, 576), (40, 32), (33, 608)]
    )


CASES = [(kind, n, k) for kind in FORMATS for n, k in _shapes(kind)]


@pytest.mark.parametrize(("kind", "n", "k"), CASES)
def test_repacking_is_lossless(kind: str, n: int, k: int) -> None:
    raw = _raw(kind, n, k)
    own = {"u4": _u4, "q3": _q3}.get(kind[:2])
    stored = own(kind, raw)[:, :k] if own else gguf.dequantize(raw, _TYPES[kind.upper()])
    assert torch.equal(unpack_linear(_packed(kind, n, k)), torch.from_numpy(stored))


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
    plain, x = _packed(kind, 40, k), _inputs(k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(3)).int()
    mixed = replace(plain, order=order)
    assert torch.equal(unpack_linear(mixed)[:, order], unpack_linear(plain))
    for backend in (native_backend(), ReferenceBackend(1)):
        assert torch.equal(_run(backend, mixed, x, 5), _run(backend, plain, x[:, order], 5))


@pytest.mark.parametrize(("kind", "n", "k"), CASES)
def test_native_equals_reference_bit_for_bit_in_every_batch(kind: str, n: int, k: int) -> None:
    weight, x, backend = _packed(kind, n, k), _inputs(k), native_backend()
    expected = _run(ReferenceBackend(1), weight, x, ROWS)
    exact = x.double() @ unpack_linear(weight).double().t() + weight.bias[:n].double()  # type: ignore[index]
    assert (expected - exact).norm() < 0.03 * exact.norm()
    for rows in range(1, ROWS + 1):
        assert torch.equal(_run(backend, weight, x, rows), expected[:rows]), rows
    assert torch.equal(_run(backend, weight, x[17:].repeat(2, 1)[:ROWS], 1), expected[17:18])


@pytest.fixture(scope="module", params=[AVX2, BASELINE])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """The same kernels for other instructions."""
    if not can_run(request.param):
        pytest.skip(f"this processor does not run code for {request.param}")
    return backend_for(request.param, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(("kind", "n", "k"), CASES)
def test_every_instruction_set_gives_the_same_bits(kind: str, n: int, k: int, other: Backend) -> None:
    weight, x = _packed(kind, n, k), _inputs(k)
    for rows in (1, 3, 5, 12, ROWS):
        assert torch.equal(_run(other, weight, x, rows), _run(native_backend(), weight, x, rows)), rows


@pytest.mark.parametrize("kind", FORMATS)
def test_the_largest_levels_do_not_saturate(kind: str, other: Backend) -> None:
    k = 512
    raw = _raw(kind, 32, k).reshape(32, -1, FORMATS[kind].block_bytes)
    scale = 208 if kind == "q6_k" else 0
    kept = raw[..., scale : scale + 2].copy()
    raw[..., 4 if FORMATS[kind].low else 0 :] = 127 if kind == "q8_0" else 255
    raw[..., scale : scale + 2] = kept
    weight = pack_block_linear(torch.from_numpy(raw.reshape(32, -1)), None, kind, k)  # type: ignore[arg-type]
    x = torch.ones(ROWS, k)
    x[1] = -1
    expected = _run(ReferenceBackend(1), weight, x, 6)
    for backend in (native_backend(), other):
        assert torch.equal(_run(backend, weight, x, 6), expected)


def test_parts_of_several_kinds_are_one_layer() -> None:
    x = _inputs(512)
    parts = (_packed("q4_k", 40, 512), _packed("q6_k", 24, 512), pack_linear(torch.randn(8, 512), None, "int8"))
    for backend in (native_backend(), ReferenceBackend(1)):
        whole = _run(backend, StackedLinear(parts), x, 5)
        assert torch.equal(whole, torch.cat([_run(backend, part, x, 5) for part in parts], dim=1))


def test_self_test_covers_the_formats() -> None:
    assert self_test(native_backend(), "auto") == "bitwise"


def test_fused_rounds_once() -> None:
    """If the double is first rounded to a tie, rounding it again goes the wrong way."""
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)  # the product is 1 + 2^-11 + 2^-24: a tie between floats
    for third, expected in ((2.0**-60, 1 + 2**-11 + 2**-23), (-(2.0**-60), 1 + 2**-11), (0.0, 1 + 2**-11)):
        got = fused(np.array([a]), np.array([b]), np.array([third], np.float32))
        assert got[0] == np.float32(expected)
