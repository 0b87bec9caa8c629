"""Batch-invariant linear layer in 16 bits: a row's bits depend on no other row, nor on how many there are."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.argument_checks import ROW_TYPES, check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.linear_cases import launches, linear_case
from verify_kernels.gpu.linear_checks import check_result
from verify_kernels.gpu.linear_kernel import linear_kernel
from verify_kernels.gpu.linear_launch import LinearLaunch
from verify_kernels.gpu.linear_tiles import FASTEST_ROWS, LinearKind, LinearMode, plan_launch, tiles_of
from verify_kernels.gpu.linear_workspace import LinearWorkspace

KINDS: dict[torch.dtype, LinearKind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: LinearMode = "bitwise",
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    x: [rows, k]; weight: [n, k] of x's type; bias: [n]; out, residual: [rows, n], may be the same tensor. float32,
    float16 or bfloat16 each. ``mode`` "fastest" gives from `FASTEST_ROWS` rows on what the vendor's library gives,
    in whatever order it adds.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or the workspace is too small.
    """
    _check(x, weight)
    (rows, k), n, kind = x.shape, weight.shape[0], KINDS[x.dtype]
    check_result(out, rows, n, x.device, inputs=x, bias=bias, residual=residual, mode=mode)
    launch = plan_launch(rows, n, k, kind)
    workspace.check(launch, x.device)
    if rows == 0:
        return
    if mode == "fastest" and rows >= FASTEST_ROWS:
        _library(x, weight, out, bias, residual)
        return
    even = k % launch.order.block_k == 0
    linear_kernel[launch.grid](
        x, weight, out, bias, residual, None, None, workspace.partials, workspace.counters, rows, n, k,
        **launch.constants(), EVEN_K=even, **launch.options(torch.version.hip is not None),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every tile, whole and in splits, with all that can be added; whole tiles also with a float32 residual stream and
    for a k that is no multiple of their block, the smallest for a k that is a multiple of nothing."""
    cases = []
    for kind in ("bf16", "fp16"):
        for launch in launches(kind):
            variants = [("", kind, True, True)]
            if launch.order.split_k == 1:
                variants += [(" to fp32", "fp32", True, True), (" ragged", kind, False, True)]
                if launch.tile == tiles_of(kind)[0]:
                    variants.append((" odd", kind, False, False))
            cases += [_case(kind, *variant, launch, amd) for variant in variants for amd in (False, True)]
    return cases


def _case(
    kind: str, suffix: str, stream: str, even: bool, aligned: bool, launch: LinearLaunch, amd: bool
) -> CompileCase:
    return linear_case(
        kind + suffix, linear_kernel, launch, amd, aligned=aligned,
        pointers={"x": kind, "w": kind, "out": stream, "bias": kind, "residual": stream},
        constants={"x_scale": None, "w_scale": None, "EVEN_K": even},
    )  # fmt: skip


def _library(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    added = [tensor for tensor in (residual, bias) if tensor is not None]
    if any(tensor.dtype != x.dtype for tensor in (out, *added)):
        y = torch.mm(x, weight.t()).float()
        out.copy_(sum((tensor.float() for tensor in added), start=y))
    elif not added:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(added[0], x, weight.t(), out=out)
        if len(added) == 2:
            out.add_(added[1])


def _check(x: Tensor, weight: Tensor) -> None:
    check_rank("x", x, 2)
    check_rank("weight", weight, 2)
    rows, k = x.shape
    if k == 0 or weight.shape[0] == 0:
        raise ValueError(f"weight: has shape {tuple(weight.shape)}; must have a row and a column at least")
    check_tensor("x", x, (rows, k), ROW_TYPES, x.device)
    check_tensor("weight", weight, (weight.shape[0], k), (x.dtype,), x.device)
