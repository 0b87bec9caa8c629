"""RMSNorm, stored or added, against torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.kernels.gpu.reference.row_ops import norm_rows as reference_norm_rows
from verify_kernels.gpu.norm import MAX_HIDDEN, norm_rows

EPS = 1e-5
# The interpreter truncates bfloat16, and a GPU rounds it: two such steps of 2^-7 separate a kernel from the exact
# value.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def oracle(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x.double(), [x.shape[-1]], weight.double(), EPS)


def rows(seed: int, n: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, hidden, generator=generator) * 3).to(device, dtype)


@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    hidden=st.sampled_from([1, 7, 80, 896, 1024, 1025, 2304]),
    dtype=st.sampled_from(DTYPES),
    adds=st.booleans(),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("run", [norm_rows, reference_norm_rows], ids=["kernel", "reference"])
def test_rows_are_normed_and_stored_or_added(device, run, n, hidden, dtype, adds, seed):  # type: ignore[no-untyped-def]
    x, out = rows(seed, n, hidden, dtype, device), rows(seed + 1, n, hidden, dtype, device)
    weight = rows(seed + 2, 1, hidden, dtype, device)[0]
    want = oracle(x, weight) + (out.double() if adds else 0)
    run(x, weight, out, eps=EPS, adds=adds)
    torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("hidden", [5120, 16384])
@pytest.mark.parametrize("adds", [False, True])
def test_wide_rows(device: torch.device, hidden: int, adds: bool) -> None:
    x, out = rows(0, 2, hidden, torch.float32, device), rows(1, 2, hidden, torch.float32, device)
    weight = rows(2, 1, hidden, torch.float32, device)[0]
    want = oracle(x, weight) + (out.double() if adds else 0)
    norm_rows(x, weight, out, eps=EPS, adds=adds)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("adds", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, dtype: torch.dtype, adds: bool) -> None:
    n, hidden = 6, 1536
    x, weight = rows(1, n, hidden, dtype, device), rows(2, 1, hidden, dtype, device)[0]
    start = rows(0, n, hidden, dtype, device)
    whole = start.clone()
    norm_rows(x, weight, whole, eps=EPS, adds=adds)
    for row in range(n):
        batch = [row, (row + 1) % n] if row % 2 else [row]
        part, part_x = start[batch], x[batch]
        part[1:], part_x[1:] = torch.nan, torch.inf
        norm_rows(part_x, weight, part, eps=EPS, adds=adds)
        assert torch.equal(part[0], whole[row])


def test_rows_wider_than_a_program_are_refused(device: torch.device) -> None:
    wide = torch.zeros(1, MAX_HIDDEN + 1, device=device)
    with pytest.raises(ValueError, match=r"^x: has rows of 16385; must be at most 16384 wide"):
        norm_rows(wide, wide[0], wide.clone(), eps=EPS)
