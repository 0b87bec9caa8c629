"""The native linear layer: against its torch twin, and against itself in other batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.natives import native_backend
from verify_kernels.backend import LinearSpec
from verify_kernels.packed_weights import PackedLinear, pack_linear, rotate, unpack_linear
from verify_kernels.reference.backend import ReferenceBackend

KINDS = ("int8", "bf16", "fp32")
MAX_ROWS = 400


def make_linear_spec(kind: str, n: int, k: int, prologue: str, epilogue: str, seed: int = 0) -> LinearSpec:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.1
    bias = torch.randn(n, generator=generator) if epilogue == "store" else None
    width = 2 * k if prologue in ("silu", "gelu") else k
    src = torch.randn(MAX_ROWS, width, generator=generator) * 3
    src[:, 0] *= 20  # an outlier channel, as real activations have
    return LinearSpec(
        pack_linear(weight, bias, kind),  # type: ignore[arg-type]
        src,
        torch.randn(MAX_ROWS, n, generator=generator),
        prologue,  # type: ignore[arg-type]
        epilogue,  # type: ignore[arg-type]
        torch.rand(k, generator=generator) + 0.5,
        torch.rand(n, generator=generator) + 0.5,
        1e-5,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prologue", ["none", "rms", "silu", "gelu"])
@pytest.mark.parametrize("epilogue", ["store", "add", "norm_add"])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 300), (96, 576)])
def test_native_matches_reference(kind: str, prologue: str, epilogue: str, n: int, k: int) -> None:
    rows = 7
    results = []
    for backend in (native_backend(), ReferenceBackend(1)):
        spec = make_linear_spec(kind, n, k, prologue, epilogue)
        backend.reserve(MAX_ROWS, 1024, 64)
        backend.bind(spec)(rows)
        results.append(spec.dst[:rows].clone())
    # int8: an activation at a rounding boundary may fall either way, one step of 1/127 of its chunk's peak.
    tolerance = 2e-3 if kind == "int8" else 2e-5
    assert torch.linalg.norm(results[0] - results[1]) <= tolerance * torch.linalg.norm(results[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prologue", "epilogue", "k"),
    [
        ("none", "store", 576), ("none", "norm_add", 300), ("rms", "store", 300), ("rms", "norm_add", 44),
        ("silu", "store", 44), ("silu", "norm_add", 576),
    ],
)  # fmt: skip
def test_rows_do_not_depend_on_the_batch(kind: str, prologue: str, epilogue: str, k: int) -> None:
    """With inputs that fill tiles and chunks to their end, and with a rest."""
    alone = []
    backend = native_backend()
    backend.reserve(MAX_ROWS, 1024, 64)
    full = make_linear_spec(kind, 200, k, prologue, epilogue)
    before = full.dst.clone()
    source = full.src.clone()
    op = backend.bind(full)
    picked = (0, 1, 5, 15, 16, 17, 32, 191, 192, 399)
    for row in picked:
        full.dst.copy_(before)
        full.src[0] = source[row]
        full.dst[0] = before[row]
        op(1)
        alone.append(full.dst[0].clone())
    for rows in (*range(2, 19), 31, 32, 33, 49, 193, 400):
        full.src.copy_(source)
        full.dst.copy_(before)
        op(rows)
        for row, expected in zip(picked, alone, strict=True):
            if row < rows:
                assert torch.equal(full.dst[row], expected), f"row {row} of {rows}"
        assert torch.equal(full.dst[rows:], before[rows:]), f"{rows} rows wrote more"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(threads: int, tmp_path: Path) -> None:
    results = []
    for count in (1, threads):
        backend = native_backend(count)
        backend.reserve(MAX_ROWS, 1024, 64)
        spec = make_linear_spec("int8", 700, 576, "rms", "add")
        backend.bind(spec)(9)
        results.append(spec.dst.clone())
    assert torch.equal(*results)


def test_int8_products_are_exact_at_the_extremes() -> None:
    """All-extreme inputs overflow int16 pair sums: an instruction that saturates there would show."""
    n, k, rows = 64, 1024, 3
    weight = torch.where(torch.rand(n, k) < 0.5, -1.0, 1.0)
    weight[:, ::2] = weight[:, 1::2]  # equal neighbours: the worst case of a pairwise sum
    src = torch.where(torch.rand(rows, k) < 0.5, -1.0, 1.0)
    src[:, ::2] = src[:, 1::2]
    src[0] = weight[0]
    backend = native_backend()
    backend.reserve(rows, k, 64)
    # The layer rotates both sides; rotated once before, they are the extremes again.
    spec = LinearSpec(pack_linear(rotate(weight), None, "int8"), rotate(src), torch.zeros(rows, n))
    backend.bind(spec)(rows)
    expected = src.double() @ weight.double().t()
    assert torch.allclose(spec.dst.double(), expected, rtol=1e-6, atol=1e-2)
    assert abs(spec.dst[0, 0].item() - k) < 1e-2


@pytest.mark.parametrize("width", [1, 2, 44, 64, 256, 300, 576, 1536])
def test_rotation_is_orthogonal_and_its_own_inverse(width: int) -> None:
    x = torch.randn(3, width)
    assert torch.allclose(rotate(rotate(x)), x, atol=1e-5)
    assert torch.allclose(rotate(x).norm(dim=1), x.norm(dim=1), rtol=1e-5)


def test_rotation_spreads_an_outlier() -> None:
    x = torch.ones(1, 256)
    x[0, 17] = 1000.0
    assert rotate(x).abs().max() < 100


@pytest.mark.parametrize("kind", KINDS)
def test_pack_round_trip(kind: str) -> None:
    weight = torch.randn(100, 203)
    back = unpack_linear(pack_linear(weight, None, kind))  # type: ignore[arg-type]
    if kind == "int8":  # the bound holds in the rotated space, in which values are rounded
        back, weight = rotate(back), rotate(weight)
    limit = {"int8": 0.5 / 127, "bf16": 2.0**-8, "fp32": 0.0}[kind] * weight.abs().amax(1, keepdim=True)
    assert back.shape == weight.shape
    assert ((back - weight).abs() <= limit * 1.001).all()


def test_wrong_buffers_are_rejected() -> None:
    backend = native_backend()
    backend.reserve(4, 64, 64)
    packed: PackedLinear = pack_linear(torch.randn(8, 16), None, "fp32")
    with pytest.raises(ValueError, match="src"):
        backend.bind(LinearSpec(packed, torch.zeros(4, 8), torch.zeros(4, 8)))
    with pytest.raises(ValueError, match="dst"):
        backend.bind(LinearSpec(packed, torch.zeros(4, 16), torch.zeros(4, 4)))
    with pytest.raises(ValueError, match="scratch"):
        backend.bind(LinearSpec(pack_linear(torch.randn(8, 199), None, "fp32"), torch.zeros(4, 199), torch.zeros(4, 8)))
