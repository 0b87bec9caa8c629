"""Rows and weights in fp8: nearest values, safe scales at the limits, independent rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.linear_rows import assert_batch_invariant
from tests.kernels.gpu.reference import row_ops as reference
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.quantize import PROLOGUES, Prologue, quantize_rows
from verify_kernels.gpu.quantized_weights import quantize_weight

EPS = 1e-6


def run(x: Any, prologue: Prologue = "none", norm: Any = None, kernel: Any = quantize_rows) -> tuple[Any, Any]:
    k = x.shape[1] // 2 if prologue in ("silu", "gelu") else x.shape[1]
    q = torch.zeros(x.shape[0], k, dtype=FP8, device=x.device)
    scale = torch.full((x.shape[0],), torch.nan, device=x.device)
    kernel(x, q, scale, prologue=prologue, norm=norm, eps=EPS)
    return q, scale


def exact(x: Any, prologue: Prologue, norm: Any) -> Any:
    """The values to quantise, in float64."""
    y = x.double()
    if prologue == "rms":
        return y / (y.square().mean(dim=1, keepdim=True) + EPS).sqrt() * norm.double()
    if prologue == "none":
        return y
    gate, up = y.chunk(2, dim=1)
    if prologue == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    # 1 + tanh(u) as 2 sigmoid(2u): of a far negative gate the sum keeps no digit, and the kernel does.
    u = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(2 * u) * up


@settings(max_examples=20)
@given(
    rows=st.integers(1, 6),
    k=st.sampled_from((1, 5, 64, 300, 1100)),
    prologue=st.sampled_from(PROLOGUES),
    dtype=st.sampled_from((torch.float16, torch.float32)),
    size=st.sampled_from((1e-3, 1.0, 30.0)),
    seed=st.integers(0, 1000),
)
def test_values_are_rounded_to_nearest(
    rows: int, k: int, prologue: Prologue, dtype: torch.dtype, size: float, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width = 2 * k if prologue in ("silu", "gelu") else k
    x = (torch.randn(rows, width, generator=generator) * size).to(device, dtype)
    norm = torch.randn(k, generator=generator).to(device, dtype) if prologue == "rms" else None
    q, scale = run(x, prologue, norm)
    y = exact(x, prologue, norm)
    assert torch.allclose(scale.double(), y.abs().amax(dim=1) / 448, rtol=1e-4)
    scaled = y / scale.double()[:, None]
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6)))
    half_step = torch.exp2(exponent - 4)
    assert bool(((q.double() - scaled).abs() <= half_step + scaled.abs() * 1e-4 + 1e-30 / scale[:, None]).all())


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_agrees_with_its_twin(prologue: Prologue, device: torch.device) -> None:
    x = torch.randn(7, 400, generator=torch.Generator().manual_seed(1)).to(device)
    norm = torch.rand(400, device=device) if prologue == "rms" else None
    q, scale = run(x, prologue, norm)
    expected, expected_scale = run(x, prologue, norm, reference.quantize_rows)
    assert torch.allclose(scale, expected_scale, rtol=1e-5)
    assert (q.float() != expected.float()).float().mean().item() < 0.01  # ties that a last place decides


def test_rows_of_several_blocks(device: torch.device) -> None:
    x = torch.randn(2, 9000, generator=torch.Generator().manual_seed(2)).to(device)
    norm = torch.rand(9000, device=device)
    x[1, 8999] = 77.0
    for prologue, weight in (("none", None), ("rms", norm)):
        q, scale = run(x, prologue, weight)  # type: ignore[arg-type]
        y = exact(x, prologue, weight)  # type: ignore[arg-type]
        assert torch.allclose(q.double() * scale.double()[:, None], y, rtol=0.07, atol=float(y.abs().max()) / 448 / 512)


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_rows_are_independent(prologue: Prologue, device: torch.device) -> None:
    x = torch.randn(30, 600, generator=torch.Generator().manual_seed(3)).to(device)
    norm = torch.rand(600, device=device) if prologue == "rms" else None

    def bits(rows: torch.Tensor) -> torch.Tensor:
        q, scale = run(rows, prologue, norm)
        return torch.cat([q.view(torch.uint8), scale[:, None].view(torch.uint8)], dim=1)

    assert_batch_invariant(bits, x, (2, 17))


def test_rows_at_the_limits_of_the_number_range(device: torch.device) -> None:
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4)).to(device)
    x[0], x[1] = 0.0, x[1] * 1e-37  # zeros; values near the least float32 there are
    x[2, 5], x[3, 6] = torch.inf, torch.nan
    x[4] *= 3e37
    q, scale = run(x)
    assert scale.isnan().tolist() == [False, False, True, True, False, False]
    assert bool((scale[[0, 1, 4, 5]] > 0).all())
    assert bool((q[:4].float() == 0).all())
    assert torch.allclose(q[4].float() * scale[4], x[4], rtol=0.07, atol=scale[4].item() / 512)
    expected, expected_scale = run(x, kernel=reference.quantize_rows)
    assert torch.allclose(scale, expected_scale, rtol=1e-6, equal_nan=True)
    assert torch.equal(q.float(), expected.float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("prologue", PROLOGUES)
def test_non_finite_rows_are_marked(prologue: Prologue, bad: float, device: torch.device) -> None:
    x = torch.randn(3, 2100, generator=torch.Generator().manual_seed(7)).to(device)
    norm = torch.rand(2100, device=device) if prologue == "rms" else None
    clean = run(x, prologue, norm)
    x[1, 2099] = bad
    q, scale = run(x, prologue, norm)
    assert scale.isnan().tolist() == [False, True, False]
    assert torch.equal(q[::2].float(), clean[0][::2].float())
    assert torch.equal(scale[::2], clean[1][::2])


def test_largest_value_of_a_row_is_448(device: torch.device) -> None:
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(5)).to(device)
    q, _ = run(x)
    assert bool((q.float().abs().amax(dim=1) == 448.0).all())


def test_weights_are_quantised_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verify_kernels.gpu.quantized_weights.ROWS_AT_ONCE", 3)
    weight = torch.randn(8, 100, generator=torch.Generator().manual_seed(6))
    weight[2], weight[5] = 0.0, weight[5] * 1e3
    q, scale = quantize_weight(weight)
    assert bool((scale > 0).all())
    assert torch.allclose(q.float() * scale[:, None], weight, rtol=0.07, atol=1e-5 * weight.abs().max().item())
    assert bool((q.float().abs().amax(dim=1)[[0, 5]] == 448.0).all())
    assert bool((q[2].float() == 0).all())
