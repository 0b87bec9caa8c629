"""The 16-bit linear kernel: right, and the same bits for a row in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from tests.kernels.gpu.linear_rows import assert_batch_invariant, assert_close, types_of, workspace
from tests.kernels.gpu.reference import linear as reference
from verify_kernels.gpu import linear_plan
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_plan import DENSE_KINDS, LinearWorkspace, plan_launch

SPLIT = (70, 1040)  # a weight whose inputs are split in two, with a tail


def operands(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator)
    bias = torch.randn(n, generator=generator)
    residual = torch.randn(rows, n, generator=generator)
    return tuple(t.to(device, dtype) for t in (x, weight, bias, residual))


def run(x: Any, weight: Any, *, space: LinearWorkspace | None = None, out: Any = None, **extra: Any) -> Any:
    space = space or workspace(*weight.shape, DENSE_KINDS[x.dtype], x.device)
    if out is None:  # float32, for a 16-bit result would hide in which order it was added up
        out = torch.full((x.shape[0], weight.shape[0]), torch.nan, device=x.device)
    linear(x, weight, out, workspace=space, **extra)
    return out


@settings(max_examples=15)
@given(
    rows=st.integers(1, 70),
    n=st.integers(1, 150),
    k=st.sampled_from((1, 7, 16, 33, 64, 65, 128, 200, 240)),
    extras=st.tuples(st.booleans(), st.booleans()),
    kind=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_agrees_with_float64(
    rows: int, n: int, k: int, extras: tuple[bool, bool], kind: int, seed: int, device: torch.device
) -> None:
    dtype = types_of(device)[kind]
    x, weight, bias, residual = operands(rows, n, k, dtype, device, seed)
    y = run(x, weight, bias=bias if extras[0] else None, residual=residual if extras[1] else None)
    magnitude = x.double().abs() @ weight.double().abs().t()
    exact = x.double() @ weight.double().t()
    exact = exact + extras[0] * bias.double() + extras[1] * residual.double()
    assert_close(y, exact, magnitude + bias.double().abs() + residual.double().abs(), k)


@pytest.mark.parametrize("out_type", [torch.float32, torch.float16, torch.bfloat16])
def test_stores_any_type_and_adds_any_type(out_type: torch.dtype, device: torch.device) -> None:
    x, weight, bias, residual = operands(9, 40, 96, torch.float16, device)
    out = torch.empty(9, 40, dtype=out_type, device=device)
    run(x, weight, out=out, bias=bias.float(), residual=residual.bfloat16())
    expected = torch.empty_like(out)
    space = workspace(40, 96, "fp16", device)
    reference.linear(x, weight, expected, workspace=space, bias=bias.float(), residual=residual.bfloat16())
    assert torch.allclose(out.float(), expected.float(), rtol=2.0**-7, atol=1e-4)


def test_the_residual_may_be_the_result(device: torch.device) -> None:
    x, weight, _, residual = operands(20, *SPLIT, torch.float16, device)
    apart = run(x, weight, residual=residual, out=torch.empty_like(residual))
    stream = residual.clone()
    run(x, weight, out=stream, residual=stream)
    assert torch.equal(stream, apart)


@pytest.mark.parametrize("shape", [(130, 200), SPLIT, (64, 4096), (48, 37)])
@pytest.mark.parametrize("kind", [0, 1])
def test_rows_have_the_same_bits_in_any_batch(shape: tuple[int, int], kind: int, device: torch.device) -> None:
    dtype = types_of(device)[kind]
    x, weight, bias, _ = operands(131 if shape[1] < 4096 else 20, *shape, dtype, device)
    space = workspace(*shape, DENSE_KINDS[dtype], device)
    if shape in (SPLIT, (64, 4096)):
        assert plan_launch(1, *shape, DENSE_KINDS[dtype]).order.split_k > 1
    few, many = (2, 17), (16, 33, 65)
    counts = few if shape[1] == 4096 else few + many
    assert_batch_invariant(lambda rows: run(rows, weight, bias=bias, space=space), x, counts)


def test_sequential_and_parallel_splits_have_equal_sums(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(linear_plan, "FULL_CHIP", 4)
    shape = (70, 2064)
    x, weight, bias, _ = operands(400, *shape, torch.float16, device)
    assert plan_launch(400, *shape, "fp16").in_sequence
    assert plan_launch(5, *shape, "fp16").grid[1] == 2
    space = LinearWorkspace.for_layers([(*shape, "fp16", 0)], 400, device)
    assert torch.equal(run(x, weight, bias=bias, space=space)[:5], run(x[:5].clone(), weight, bias=bias, space=space))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's order of programs is changed")
def test_the_order_in_which_splits_finish_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    x, weight, bias, _ = operands(3, *SPLIT, torch.float16, device)
    forwards = run(x, weight, bias=bias)
    builder = interpreter.interpreter_builder
    original, last = builder.set_grid_idx, plan_launch(3, *SPLIT, "fp16").grid[1] - 1
    monkeypatch.setattr(builder, "set_grid_idx", lambda i, j, k: original(i, last - j, k))
    assert torch.equal(run(x, weight, bias=bias), forwards)


def test_scratch_is_ready_for_the_next_launch(device: torch.device) -> None:
    x, weight, _, _ = operands(20, *SPLIT, torch.float16, device)
    space = workspace(*SPLIT, "fp16", device)
    first = run(x, weight, space=space)
    assert int(space.counters.abs().sum()) == 0
    assert torch.equal(run(x[:7].clone(), weight, space=space), first[:7])


def test_rows_beyond_the_count_are_not_touched(device: torch.device) -> None:
    x, weight, _, _ = operands(5, 40, 64, torch.float16, device)
    padded = torch.full((32, 40), 7.0, dtype=torch.float16, device=device)
    run(x, weight, out=padded[:5])
    assert bool((padded[5:] == 7.0).all())


def test_infinite_and_nan_rows_stay_in_their_rows(device: torch.device) -> None:
    x, weight, _, _ = operands(4, 40, 70, torch.float16, device)
    clean = run(x, weight)
    x[1, 3], x[2, 69] = torch.nan, torch.inf
    mixed = run(x, weight)
    assert torch.equal(mixed[[0, 3]], clean[[0, 3]])
    assert not bool(mixed[1].isfinite().any())
