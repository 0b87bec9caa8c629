"""Gathered rows: values exact, strange indices read as zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.recorded_launches import recorded_launches
from tests.kernels.gpu.reference.row_ops import gather_rows as reference_gather_rows
from verify_kernels.gpu.gather_rows import gather_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STRANGE = [-1, -(2**31), 2**31 - 1]


def table_of(rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Values that every dtype represents exactly, so that conversions cannot hide a wrong row."""
    values = torch.randint(-128, 128, (rows, width), generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def indices(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@settings(max_examples=20)
@given(
    width=st.sampled_from([1, 80, 1024, 1030]),
    rows=st.integers(1, 9),
    picks=st.lists(st.integers(-2, 10) | st.sampled_from(STRANGE), min_size=1, max_size=6),
    source=st.sampled_from(DTYPES),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1.0, 0.5, 4.0]),
)
@pytest.mark.parametrize("run", [gather_rows, reference_gather_rows], ids=["kernel", "reference"])
def test_rows_are_gathered_and_scaled(device, run, width, rows, picks, source, dtype, scale):  # type: ignore[no-untyped-def]
    table = table_of(rows, width, source, device)
    out = torch.full((len(picks), width), torch.nan, dtype=dtype, device=device)
    run(table, indices(picks, device), out, scale)
    for row, pick in enumerate(picks):
        want = table[pick].float() * scale if 0 <= pick < rows else torch.zeros(width, device=device)
        assert torch.equal(out[row].float(), want)


@pytest.mark.parametrize("run", [gather_rows, reference_gather_rows], ids=["kernel", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_keeps_every_bit(device: torch.device, run, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(7, 200, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x[3, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, 1e-7])
    out = torch.full((5, 200), torch.nan, dtype=dtype, device=device)
    run(x, indices([6, 3, 3, -1, 0], device), out)
    assert torch.equal(out[[0, 1, 2, 4]], x[[6, 3, 3, 0]])
    assert torch.equal(out[1].signbit(), x[3].signbit())
    assert torch.equal(out[3], torch.zeros_like(out[3]))


def test_a_fraction_is_scaled_in_float32(device: torch.device) -> None:
    table = table_of(4, 48, torch.float16, device)
    out = torch.empty(2, 48, device=device)
    gather_rows(table, indices([2, 1], device), out, 48**0.5)
    assert torch.equal(out, table[[2, 1]].float() * torch.tensor(48**0.5, device=device))


def test_no_rows_are_no_work(device: torch.device) -> None:
    with recorded_launches() as launches:
        gather_rows(torch.ones(3, 4, device=device), indices([], device), torch.empty(0, 4, device=device))
    assert not launches
