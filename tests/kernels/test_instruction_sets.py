"""The kernels for other processors: with fused multiply-add, exactly the bits of this one's."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.numeric_fingerprint import host_arithmetic
from tests.kernels.batches import random_batch
from tests.kernels.natives import CACHE, backend_for, native_backend
from tests.kernels.test_experts import make_spec as make_experts_spec
from tests.kernels.test_experts import run as run_experts
from tests.kernels.test_linear import KINDS, MAX_ROWS, make_linear_spec
from tests.kernels.test_quant_linear import (
    QUANT_CASES,
    ROWS,
    make_inputs,
    packed_blocks,
    raw_blocks,
    run_linear,
)
from tests.kernels.test_tree_attention import DTYPES, PAGES, make_spec, run
from verify_kernels.backend_selection import load_kernels
from verify_kernels.cpu.native_backend import NativeBackend
from verify_kernels.packed_weights import pack_block_linear
from verify_kernels.quant_formats import FORMATS
from verify_kernels.reference.backend import ReferenceBackend

AVX2, BASELINE = "x86-64-v3", "x86-64"
V3_FLAGS = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="builds for x86-64")


def can_run(processor: str) -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return processor == BASELINE or set(flags) >= V3_FLAGS


@pytest.fixture(scope="module", params=[AVX2, BASELINE])
def other(request: pytest.FixtureRequest) -> tuple[NativeBackend, bool]:
    """A backend for other instructions, and whether it rounds like this processor: fused, as with AVX2."""
    if not can_run(request.param):
        pytest.skip(f"this processor does not run code for {request.param}")
    return backend_for(request.param), request.param == AVX2 or not can_run(AVX2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [576, 300])
def test_linear(kind: str, k: int, other: tuple[NativeBackend, bool]) -> None:
    backend, same_rounding = other
    for rows in (1, 2, 5, 8, 12, 13, 30, 49):
        results = []
        for one in (native_backend(), backend):
            spec = make_linear_spec(kind, 130, k, "none", "store")
            one.reserve(MAX_ROWS, 1024, 64)
            one.bind(spec)(rows)
            results.append(spec.dst[:rows].clone())
        if same_rounding or kind == "int8":  # sums of integers are exact, and nothing else is fused
            assert torch.equal(*results)
        assert torch.allclose(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "fp32", "q4_0", "q4_k", "q6_k"])
def test_experts(kind: str, other: tuple[NativeBackend, bool]) -> None:
    backend, same_rounding = other
    for normalise in (True, False):
        for rows in (1, 5, 60):
            results = [
                run_experts(one, make_experts_spec(kind, normalise=normalise), rows)
                for one in (native_backend(), backend)
            ]
            assert torch.equal(*results) or not same_rounding
            assert torch.allclose(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "n", "k"), QUANT_CASES)
def test_weights_in_blocks(kind: str, n: int, k: int, other: tuple[NativeBackend, bool]) -> None:
    """The same bits by every instruction set, rounding included."""
    weight, x = packed_blocks(kind, n, k), make_inputs(k)
    for rows in (1, 3, 5, 12, ROWS):
        assert torch.equal(run_linear(other[0], weight, x, rows), run_linear(native_backend(), weight, x, rows)), rows


@pytest.mark.parametrize("kind", FORMATS)
def test_the_largest_levels_do_not_saturate(kind: str, other: tuple[NativeBackend, bool]) -> None:
    k = 512
    raw = raw_blocks(kind, 32, k).reshape(32, -1, FORMATS[kind].block_bytes)
    scale = 208 if kind == "q6_k" else 0
    kept = raw[..., scale : scale + 2].copy()
    raw[..., 4 if FORMATS[kind].low else 0 :] = 127 if kind == "q8_0" else 255
    raw[..., scale : scale + 2] = kept
    weight = pack_block_linear(torch.from_numpy(raw.reshape(32, -1)), None, kind, k)  # type: ignore[arg-type]
    x = torch.ones(ROWS, k)
    x[1] = -1
    expected = run_linear(ReferenceBackend(1), weight, x, 6)
    for backend in (native_backend(), other[0]):
        assert torch.equal(run_linear(backend, weight, x, 6), expected)


@pytest.mark.parametrize("prologue", ["rms", "silu", "gelu"])
def test_prologues(prologue: str, other: tuple[NativeBackend, bool]) -> None:
    backend, same_rounding = other
    results = []
    for one in (native_backend(), backend):
        spec = make_linear_spec("fp32", 64, 330, prologue, "norm_add")
        one.reserve(MAX_ROWS, 1024, 64)
        one.bind(spec)(9)
        results.append(spec.dst[:9].clone())
    assert torch.equal(*results) or not same_rounding
    assert torch.allclose(*results, rtol=1e-3, atol=1e-3)


def test_the_largest_values_do_not_saturate(other: tuple[NativeBackend, bool]) -> None:
    """One value alone is the same everywhere once rotated: every activation is 127, and every weight the largest."""
    for backend in (native_backend(), other[0]):
        for byte in (0, 255):
            specs = [make_linear_spec("int8", 64, 512, "none", "store") for _ in range(2)]
            for spec, one in zip(specs, (backend, ReferenceBackend(1)), strict=True):
                spec.src.zero_()
                spec.src[:, 0] = 5.0
                spec.weight.data.fill_(byte)
                one.reserve(MAX_ROWS, 1024, 64)
                one.bind(spec)(6)
            assert torch.allclose(specs[0].dst[:6], specs[1].dst[:6], rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (12, 2, 128), (5, 1, 80), (2, 1, 64), (3, 3, 96)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, other: tuple[NativeBackend, bool]) -> None:
    backend, same_rounding = other
    rng = np.random.default_rng(heads * dim)
    batch, _ = random_batch(rng, [(130, 0, 7), (0, 20, 3), (200, 0, 0)], PAGES, 10)
    spec = make_spec(heads, kv_heads, dim, 0, qk_norm=True, dtype=dtype)
    results = [run(one, spec, batch) for one in (native_backend(), backend)]
    assert torch.equal(*results) or not same_rounding
    assert torch.allclose(*results, rtol=1e-4, atol=2e-6)


def test_the_fingerprint_identifies_processors_that_round_alike(other: tuple[NativeBackend, bool]) -> None:
    backend, same_rounding = other
    ours = load_kernels("native", CACHE, 2)
    theirs = dataclasses.replace(ours, backend=lambda: backend)
    assert (host_arithmetic(ours) == host_arithmetic(theirs)) == same_rounding
