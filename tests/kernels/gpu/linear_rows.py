"""Shared helpers of the tests of the linear kernels: random operands, float64 oracles, rows in batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from verify_kernels.gpu.linear_plan import LinearKind, LinearWorkspace
from verify_kernels.gpu.quantized_weights import Int4Weight, pack_int4

MAX_ROWS = 300


def types_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Row types that can be tested: triton's interpreter computes bfloat16 products wrongly."""
    return (torch.float16, torch.float32) if device.type == "cpu" else (torch.float16, torch.bfloat16)


def workspace(
    n: int, k: int, kind: LinearKind, device: torch.device, group: int = 128, permuted: torch.dtype | None = None
) -> LinearWorkspace:
    """Scratch for one layer, filled with NaN."""
    space = LinearWorkspace.for_layers([(n, k, kind, group)], MAX_ROWS, device, permuted)
    space.partials.fill_(torch.nan)
    if space.permuted is not None:
        space.permuted.fill_(torch.nan)
    return space


def random_int4(
    n: int, k: int, group: int, generator: torch.Generator, device: torch.device, *, perm: bool = False
) -> tuple[Int4Weight, Tensor]:
    """A random quantised weight, packed, and the float64 matrix it stands for."""
    groups = -(-k // group)
    levels = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scales = (torch.rand(n, groups, generator=generator) * 0.1 + 0.01).half()
    zeros = torch.randint(0, 17, (n, groups), dtype=torch.uint8, generator=generator)
    order = torch.randperm(k, generator=generator) if perm else torch.arange(k)
    at = torch.arange(k) // group
    matrix = torch.zeros(n, k, dtype=torch.float64)
    matrix[:, order] = (levels.double() - zeros.double()[:, at]) * scales.double()[:, at]
    packed = pack_int4(levels, scales, zeros, group, order if perm else None)
    return packed.to(device), matrix.to(device)


def assert_close(y: Tensor, exact: Tensor, magnitude: Tensor, k: int) -> None:
    """``y`` against the float64 result. magnitude: the sum of |x| |w|, in which additions may err."""
    least = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[y.dtype]
    allowed = exact.abs() * least + magnitude * (k + 8) * 2.0**-24 + 1e-7
    assert bool(y.isfinite().all())
    worst = ((y.double() - exact).abs() / allowed).max().item()
    assert worst <= 1.0, f"error is {worst:.3g} times what rounding explains"


def assert_batch_invariant(run: Callable[[Tensor], Tensor], rows: Tensor, counts: tuple[int, ...]) -> None:
    """``run`` of [rows, k] gives the first rows the bits they have alone, and all of them the same bits in batches
    of other sizes, also upside down."""
    alone = torch.cat([run(rows[i : i + 1].clone()) for i in range(min(8, len(rows)))])
    together = run(rows.clone())
    assert torch.equal(together[: len(alone)], alone)
    for count in counts:
        assert torch.equal(run(rows[:count].clone()), together[:count]), f"{count} rows"
        flipped = run(rows[-count:].flip(0).contiguous())
        assert torch.equal(flipped.flip(0), together[-count:]), f"last {count} rows, upside down"
