"""Batch-invariant linear layer of 16-bit rows and 4-bit weights (AWQ and GPTQ checkpoints)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.argument_checks import check_rank, check_tensor
from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.linear_cases import launches, linear_case
from verify_kernels.gpu.linear_checks import check_result
from verify_kernels.gpu.linear_int4_kernel import linear_int4_kernel
from verify_kernels.gpu.linear_int4_weight import CHUNK, GROUP_SIZES, Int4Weight
from verify_kernels.gpu.linear_launch import LinearLaunch
from verify_kernels.gpu.linear_permute import permute_columns
from verify_kernels.gpu.linear_tiles import LinearMode, block_k_of, plan_launch
from verify_kernels.gpu.linear_workspace import LinearWorkspace

HALVES = (torch.float16, torch.bfloat16)
SCALE_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear_int4(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    mode: LinearMode = "bitwise",
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    x: float16 or bfloat16 [rows, k]; bias: [n]; out, residual: [rows, n], may be the same tensor; float32, float16 or
    bfloat16 each. A weight with an input order of its own costs one more launch, which orders the rows' channels
    alike. ``mode`` "fastest" never splits k where the rows alone fill the chip.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or the workspace is too small.
    """
    _check(x, weight)
    rows = x.shape[0]
    check_result(out, rows, weight.n, x.device, inputs=x, bias=bias, residual=residual, mode=mode)
    launch = plan_launch(rows, weight.n, weight.k, "int4", weight.group, mode)
    workspace.check(launch, x.device)
    if rows == 0:
        return
    if weight.perm is not None:
        x = _ordered(x, weight.perm, workspace)
    amd = torch.version.hip is not None
    linear_int4_kernel[launch.grid](
        x, weight.words, weight.quants, out, bias, residual, workspace.partials, workspace.counters,
        rows, weight.n, weight.k, **launch.constants(), GROUPS=weight.block_k // weight.group,
        SCALE_TYPE=SCALE_TYPES[weight.scale_type], EVEN_K=weight.k % weight.block_k == 0, ASM=x.is_cuda and not amd,
        **launch.options(amd),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every tile, whole and in splits, with all that can be added, for bfloat16 rows and float16 scales in groups of
    any size. Other types, and a k that is no multiple of the block (whole only), in the usual groups."""
    usual = GROUP_SIZES[-1]
    forms = [("bf16", tl.float16, group) for group in GROUP_SIZES]
    forms += [("fp16", tl.float16, usual), ("bf16", tl.bfloat16, usual)]
    return [
        _case(kind, scale, group, launch, amd, even)
        for kind, scale, group in forms
        for launch in launches("int4", group)
        for amd in (False, True)
        for even in ((True, False) if launch.order.split_k == 1 and group == usual else (True,))
    ]


def _case(kind: str, scale: tl.dtype, group: int, launch: LinearLaunch, amd: bool, even: bool) -> CompileCase:
    return linear_case(
        f"{kind} {scale} scales, group {group}{'' if even else ' ragged'}", linear_int4_kernel, launch, amd,
        pointers={"x": kind, "words": "i16", "quants": "i32", "out": kind, "bias": kind, "residual": kind},
        constants={"GROUPS": launch.order.block_k // group, "SCALE_TYPE": scale, "EVEN_K": even, "ASM": not amd},
    )  # fmt: skip


def _ordered(x: Tensor, perm: Tensor, workspace: LinearWorkspace) -> Tensor:
    scratch = workspace.permuted
    if scratch is None or scratch.dtype != x.dtype or scratch.numel() < x.numel():
        raise ValueError(
            f"workspace: lacks {x.numel()} values of {x.dtype} for rows in the weight's input order; "
            "make it for_layers() with permuted"
        )
    ordered = scratch[: x.numel()].view(x.shape)
    permute_columns(x, perm, ordered)
    return ordered


def _check(x: Tensor, weight: Int4Weight) -> None:
    check_rank("x", x, 2)
    check_tensor("x", x, (x.shape[0], weight.k), HALVES, x.device)
    if weight.group not in GROUP_SIZES:
        raise ValueError(f"weight.group: is {weight.group}; must be one of {', '.join(map(str, GROUP_SIZES))}")
    block = block_k_of("int4", weight.group)
    chunks, blocks = -(-weight.n // CHUNK), -(-weight.k // block)
    check_tensor("weight.words", weight.words, (chunks, blocks, CHUNK, block // 4), (torch.int16,), x.device)
    grouped = (chunks, blocks, block // weight.group, CHUNK)
    check_tensor("weight.quants", weight.quants, grouped, (torch.int32,), x.device)
    if weight.scale_type not in SCALE_TYPES:
        raise ValueError(
            f"weight.scale_type: is {weight.scale_type}; must be one of {', '.join(map(str, SCALE_TYPES))}"
        )
    if weight.perm is not None:
        check_tensor("weight.perm", weight.perm, (weight.k,), (torch.int32,), x.device)
