"""The 4-bit linear kernel and its packing: right, and the same bits for a row in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.linear_rows import assert_batch_invariant, assert_close, random_int4, types_of, workspace
from tests.kernels.gpu.reference import linear as reference
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_plan import plan_launch
from verify_kernels.gpu.quantized_weights import GROUP_SIZES, Int4Weight, pack_int4, stack_int4, unpack_int4

groups = st.sampled_from(GROUP_SIZES)


def run(x: Any, weight: Int4Weight, out_type: torch.dtype = torch.float32, **extra: Any) -> Any:
    out = torch.full((x.shape[0], weight.n), torch.nan, dtype=out_type, device=x.device)
    space = workspace(weight.n, weight.k, "int4", x.device, weight.group, x.dtype)
    linear_int4(x, weight, out, workspace=space, **extra)
    return out


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(n=st.integers(1, 140), k=st.integers(1, 600), group=groups, perm=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_unpacking_inverts_packing(n: int, k: int, group: int, perm: bool, seed: int) -> None:
    packed, matrix = random_int4(n, k, group, seeded(seed), torch.device("cpu"), perm=perm)
    assert torch.equal(unpack_int4(packed).double(), matrix)
    assert packed.nbytes == packed.words.nbytes + packed.quants.nbytes


@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 140),
    k=st.sampled_from((1, 32, 96, 250, 256, 300, 512)),
    group=groups,
    perm=st.booleans(),
    added=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(
    rows: int, n: int, k: int, group: int, perm: bool, added: bool, seed: int, device: torch.device
) -> None:
    weight, matrix = random_int4(n, k, group, seeded(seed), device, perm=perm)
    x = torch.randn(rows, k, generator=seeded(seed)).to(device, types_of(device)[0])
    residual = torch.randn(rows, n, generator=seeded(seed)).to(device)
    bias = residual[0].clone()
    y = run(x, weight, bias=bias if added else None, residual=residual if added else None)
    exact = x.double() @ matrix.t() + added * (residual.double() + bias.double())
    magnitude = x.double().abs() @ matrix.abs().t() + 2 * residual.double().abs() + bias.double().abs()
    assert_close(y, exact, magnitude, k)


@pytest.mark.parametrize(("shape", "group"), [((130, 512), 128), ((70, 300), 32), ((40, 4096), 128), ((64, 1024), 64)])
def test_rows_have_the_same_bits_in_any_batch(shape: tuple[int, int], group: int, device: torch.device) -> None:
    weight, _ = random_int4(*shape, group, seeded(3), device)
    assert (plan_launch(1, *shape, "int4", group).order.split_k > 1) == (shape[1] >= 1024)
    few = shape[1] > 1000
    x = torch.randn(20 if few else 70, shape[1], generator=seeded(4)).to(device, types_of(device)[0])
    assert_batch_invariant(lambda rows: run(rows, weight), x, (2, 17) if few else (2, 17, 33, 65))


def test_agrees_with_its_twin(device: torch.device) -> None:
    weight, _ = random_int4(70, 256, 64, seeded(1), device, perm=True)
    x = torch.randn(20, 256, generator=seeded(2)).to(device, types_of(device)[0])
    expected = torch.empty(20, 70, device=device)
    space = workspace(70, 256, "int4", device, 64)
    reference.linear_int4(x, weight, expected, workspace=space)
    assert torch.allclose(run(x, weight), expected, rtol=1e-4, atol=1e-3)


def test_levels_zeros_and_scales_at_their_ends(device: torch.device) -> None:
    levels = torch.zeros(64, 128, dtype=torch.uint8)
    levels[::2] = 15
    for zero, scale in ((0, 6.1e-5), (16, 6e4), (15, 6e-8), (8, -1.0)):
        zeros = torch.full((64, 1), zero, dtype=torch.uint8)
        scales = torch.full((64, 1), scale).half()
        weight = pack_int4(levels, scales, zeros, 128).to(device)
        x = torch.ones(1, 128, device=device, dtype=types_of(device)[0])
        exact = 128.0 * (levels[:, 0].double() - zero) * scales[:, 0].double()
        assert torch.allclose(run(x, weight)[0].double().cpu(), exact, rtol=1e-6)


def test_scales_in_bfloat16_unpack_exactly() -> None:
    weight, _ = random_int4(64, 128, 64, seeded(5), torch.device("cpu"))
    levels = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=seeded(6))
    scales = torch.rand(64, 2, generator=seeded(7)).bfloat16()
    matrix = unpack_int4(pack_int4(levels, scales, torch.full((64, 2), 8, dtype=torch.uint8), 64))
    assert torch.equal(matrix, (levels.float() - 8) * scales.float().repeat_interleave(64, dim=1))
    assert weight.block_k == 256


def test_stacked_layers_equal_the_layers(device: torch.device) -> None:
    perm = torch.randperm(128, generator=seeded(7)).to(device, torch.int32)
    parts = [replace(random_int4(n, 128, 64, seeded(8), device)[0], perm=perm) for n in (64, 128, 30)]
    whole = stack_int4(parts)
    assert torch.equal(unpack_int4(whole), torch.cat([unpack_int4(part) for part in parts]))
    x = torch.randn(3, 128, generator=seeded(9)).to(device, types_of(device)[0])
    assert torch.equal(run(x, whole), torch.cat([run(x, part) for part in parts], dim=1))
