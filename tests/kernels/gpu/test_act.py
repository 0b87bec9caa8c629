"""Gated activations against torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.kernels.gpu.reference.row_ops import act_mul as reference_act_mul
from verify_kernels.gpu.act import act_mul

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def gates(seed: int, n: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(n, 2 * width, generator=torch.Generator().manual_seed(seed)) * 3).to(device, dtype)


def oracle(gate_up: Tensor, kind: str) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up


@settings(max_examples=20)
@given(
    n=st.integers(1, 3),
    width=st.sampled_from([1, 16, 1023, 1024, 1040, 4864]),
    source=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("run", [act_mul, reference_act_mul], ids=["kernel", "reference"])
def test_act_is_gate_times_up(device, run, kind, n, width, source, dtype, seed):  # type: ignore[no-untyped-def]
    gate_up = gates(seed, n, width, source, device)
    out = torch.full((n, width), torch.nan, dtype=dtype, device=device)
    run(gate_up, out, kind)
    torch.testing.assert_close(out.double(), oracle(gate_up, kind), rtol=TOLERANCE[dtype], atol=2e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_extreme_gates_are_closed_or_open(device: torch.device, kind: str) -> None:
    gate = torch.tensor([[-60000.0, -300.0, -90.0, 0.0, 90.0, 300.0, 60000.0]], device=device)
    out = torch.empty_like(gate)
    act_mul(torch.cat([gate, torch.ones_like(gate)], dim=1), out, kind)  # type: ignore[arg-type]
    torch.testing.assert_close(out, gate.clamp(min=0.0))


def test_a_row_has_the_same_bits_in_any_batch(device: torch.device) -> None:
    gate_up = gates(0, 5, 1500, torch.float16, device)
    whole = torch.empty(5, 1500, dtype=torch.float16, device=device)
    act_mul(gate_up, whole, "gelu")
    for row in range(5):
        alone = torch.empty_like(whole[:1])
        act_mul(gate_up[row : row + 1].clone(), alone, "gelu")
        assert torch.equal(alone[0], whole[row])
