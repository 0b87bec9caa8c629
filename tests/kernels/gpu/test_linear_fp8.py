"""The fp8 linear kernel: results, scales, and the same bits for a row in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.linear_rows import assert_batch_invariant, assert_close, workspace
from tests.kernels.gpu.reference import linear as reference
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_plan import plan_launch

SPLIT = (48, 2064)


def operands(rows: int, n: int, k: int, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, k, generator=generator) * 100).clamp(-448, 448).to(FP8)
    weight = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(FP8)
    x_scale = torch.rand(rows, generator=generator) * 1e-2
    w_scale = torch.rand(n, generator=generator) * 1e-2
    return tuple(t.to(device) for t in (x, x_scale, weight, w_scale))


def run(x: Any, x_scale: Any, weight: Any, w_scale: Any, out_type: torch.dtype = torch.float32, **extra: Any) -> Any:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=out_type, device=x.device)
    space = workspace(*weight.shape, "fp8", x.device)
    linear(x, weight, out, workspace=space, scales=(x_scale, w_scale), **extra)
    return out


@settings(max_examples=10)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 140),
    k=st.sampled_from((1, 16, 40, 128, 144, 300)),
    added=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(rows: int, n: int, k: int, added: bool, seed: int, device: torch.device) -> None:
    given_ = operands(rows, n, k, device, seed)
    x, x_scale, weight, w_scale = (t.double() for t in given_)
    residual = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(device)
    bias = residual[0].clone()
    y = run(*given_, bias=bias if added else None, residual=residual if added else None)
    left, right = x * x_scale[:, None], weight * w_scale[:, None]
    exact = left @ right.t() + added * (bias.double() + residual.double())
    magnitude = left.abs() @ right.abs().t() + 2 * residual.double().abs() + bias.double().abs()
    assert_close(y, exact, magnitude, terms(k, device))


def terms(k: int, device: torch.device) -> int:
    """Additions that round. Hopper adds products of one instruction with 14 bits: see max_num_imprecise_acc."""
    return k if device.type == "cpu" else 2**13


@pytest.mark.parametrize("shape", [(130, 200), SPLIT])
def test_rows_have_the_same_bits_in_any_batch(shape: tuple[int, int], device: torch.device) -> None:
    x, x_scale, weight, w_scale = operands(70, *shape, device)
    assert (plan_launch(1, *shape, "fp8").order.split_k > 1) == (shape == SPLIT)
    carried = torch.cat([x.view(torch.uint8), x_scale[:, None].view(torch.uint8)], dim=1)  # a row with its scale

    def unpacked(rows: torch.Tensor) -> torch.Tensor:
        values, scales = rows[:, : shape[1]].clone().view(FP8), rows[:, shape[1] :].clone().view(torch.float32)
        return run(values, scales.flatten(), weight, w_scale)

    assert_batch_invariant(unpacked, carried, (2, 17, 33))


def test_agrees_with_its_twin(device: torch.device) -> None:
    x, x_scale, weight, w_scale = operands(20, 70, 200, device)
    bias = torch.randn(70, device=device)
    expected = torch.empty(20, 70, device=device)
    space = workspace(70, 200, "fp8", device)
    reference.linear(x, weight, expected, workspace=space, scales=(x_scale, w_scale), bias=bias)
    y = run(x, x_scale, weight, w_scale, bias=bias)
    if device.type == "cpu":
        assert torch.allclose(y, expected, rtol=1e-4, atol=1e-3)
    left, right = x.double() * x_scale[:, None], weight.double() * w_scale[:, None]
    magnitude = left.abs() @ right.abs().t() + bias.double().abs()
    assert_close(y, expected.double(), magnitude, terms(200, device))


def test_zero_scales_give_zero_and_extremes_stay_finite(device: torch.device) -> None:
    x, x_scale, weight, w_scale = operands(4, 20, 64, device)
    x_scale[1], w_scale[3] = 0.0, 0.0
    x[2], weight[5] = 448.0, -448.0
    y = run(x, x_scale, weight, w_scale)
    assert bool((y[1] == 0).all())
    assert bool((y[:, 3] == 0).all())
    assert y[2, 5].item() == pytest.approx(-64 * 448.0**2 * x_scale[2].item() * w_scale[5].item(), rel=1e-5)
