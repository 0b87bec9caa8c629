"""Residual add and RMSNorm against torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm

from tests.kernels.gpu.recorded_launches import recorded_launches
from tests.kernels.gpu.reference.row_ops import add_norm as reference_add_norm
from verify_kernels.gpu.norm import MAX_HIDDEN, add_norm

EPS = 1e-5
# The interpreter truncates bfloat16, and a GPU rounds it: two such steps of 2^-7 separate a kernel from the exact
# value.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def oracle(residual: Tensor, y: Tensor | None, post: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
    hidden = [residual.shape[-1]]
    x = residual.double()
    if y is not None:
        x = x + (y.double() if post is None else rms_norm(y.double(), hidden, post.double(), EPS))
    return x, x if norm is None else rms_norm(x, hidden, norm.double(), EPS)


def rows(seed: int, n: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, hidden, generator=generator) * 3).to(device, dtype)


@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    hidden=st.sampled_from([1, 7, 80, 896, 1024, 1025, 2304]),
    stream=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["norm", "y", "y norm", "y post", "y post norm"]),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("run", [add_norm, reference_add_norm], ids=["kernel", "reference"])
def test_norm_is_add_then_norm(device, run, n, hidden, stream, dtype, mode, seed):  # type: ignore[no-untyped-def]
    given = mode.split()
    residual = rows(seed, n, hidden, stream, device)
    y = rows(seed + 1, n, hidden, dtype, device) if "y" in given else None
    post = rows(seed + 2, 1, hidden, dtype, device)[0] if "post" in given else None
    norm = rows(seed + 3, 1, hidden, dtype, device)[0] if "norm" in given else None
    out = torch.full((n, hidden), torch.nan, dtype=dtype, device=device) if "norm" in given else None
    want_residual, _ = oracle(residual, y, post, norm)
    run(residual, eps=EPS, y=y, post_norm=post, norm=norm, out=out)
    tolerance = TOLERANCE[stream]
    torch.testing.assert_close(residual.double(), want_residual, rtol=tolerance, atol=2 * tolerance)
    if out is not None:
        # The norm is of the residual as stored.
        _, want = oracle(residual, None, None, norm)
        torch.testing.assert_close(out.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("hidden", [5120, 16384])
def test_wide_rows(device: torch.device, hidden: int) -> None:
    residual, y = rows(0, 2, hidden, torch.float32, device), rows(1, 2, hidden, torch.float32, device)
    post, norm = rows(2, 2, hidden, torch.float32, device)
    out = torch.empty_like(residual)
    want_residual, want = oracle(residual, y, post, norm)
    add_norm(residual, eps=EPS, y=y, post_norm=post, norm=norm, out=out)
    torch.testing.assert_close(residual.double(), want_residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, dtype: torch.dtype) -> None:
    n, hidden = 6, 1536
    y, post, norm = rows(1, n, hidden, dtype, device), rows(2, 1, hidden, dtype, device)[0], None
    norm = rows(3, 1, hidden, dtype, device)[0]
    whole = rows(0, n, hidden, dtype, device)
    start, out = whole.clone(), torch.empty_like(whole)
    add_norm(whole, eps=EPS, y=y, post_norm=post, norm=norm, out=out)
    for row in range(n):
        batch = [row, (row + 1) % n] if row % 2 else [row]
        part, part_y, part_out = start[batch], y[batch], torch.empty_like(start[batch])
        part[1:], part_y[1:] = torch.nan, torch.inf
        add_norm(part, eps=EPS, y=part_y, post_norm=post, norm=norm, out=part_out)
        assert torch.equal(part[0], whole[row])
        assert torch.equal(part_out[0], out[row])


def test_fused_equals_add_then_norm(device: torch.device) -> None:
    fused, y = rows(0, 3, 320, torch.float16, device), rows(1, 3, 320, torch.float16, device)
    post, norm = rows(2, 2, 320, torch.float16, device)
    split, out, split_out = fused.clone(), torch.empty_like(fused), torch.empty_like(fused)
    add_norm(fused, eps=EPS, y=y, post_norm=post, norm=norm, out=out)
    add_norm(split, eps=EPS, y=y, post_norm=post)
    add_norm(split, eps=EPS, norm=norm, out=split_out)
    assert torch.equal(fused, split)
    assert torch.equal(out, split_out)


def test_no_rows_are_no_work(device: torch.device) -> None:
    none = torch.empty(0, 64, device=device)
    with recorded_launches() as launches:
        add_norm(none, eps=EPS, y=none, norm=torch.ones(64, device=device), out=none.clone())
    assert not launches


def test_rows_wider_than_a_program_are_refused(device: torch.device) -> None:
    wide = torch.zeros(1, MAX_HIDDEN + 1, device=device)
    with pytest.raises(ValueError, match=r"^residual: has rows of 16385; must be at most 16384 wide"):
        add_norm(wide, eps=EPS, norm=wide[0], out=wide.clone())
