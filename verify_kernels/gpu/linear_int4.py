# mypy: disallow-untyped-defs=False

"""Batch-invariant linear layer of 16-bit rows and 4-bit weights (AWQ and GPTQ checkpoints)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from verify_kernels.gpu.kernel_launch import CompileCase, await_previous, chip_of, launch_options
from verify_kernels.gpu.linear import reduce_splits, store_partial, store_tile
from verify_kernels.gpu.linear_plan import (
    AMD,
    FAMILIES,
    LinearLaunch,
    LinearWorkspace,
    launches,
    linear_case,
    plan_launch,
)
from verify_kernels.gpu.quantized_weights import CHUNK, GROUP_SIZES, Int4Weight

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _offset(levels, like: tl.constexpr):
    """Small integers as 128 + level in bfloat16, 1024 + level in float16: the level is the end of the mantissa."""
    if like == tl.bfloat16:
        return (levels.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        return (levels.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)


# Two 16-bit words to two values of each nibble. BASE: the bits in front of the level, as in `_offset`, twice.
_UNPACK = """{
.reg .b32 t;
lop3.b32 $0, $4, 0x000f000f, BASE, 0xea;
shr.u32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, BASE, 0xea;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, BASE, 0xea;
shr.u32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, BASE, 0xea;
}"""
_UNPACK_BF16 = tl.constexpr(_UNPACK.replace("BASE", "0x43004300"))
_UNPACK_FP16 = tl.constexpr(_UNPACK.replace("BASE", "0x64006400"))


@triton.jit
def _nibbles(words, like: tl.constexpr, ASM: tl.constexpr):
    """The four nibbles of 16-bit words, lowest first, as `_offset` writes them. With ASM two words at a time in seven
    instructions, which triton does not find by itself: at full bandwidth there is time for about one per weight."""
    if ASM:
        if like == tl.bfloat16:
            return tl.inline_asm_elementwise(
                _UNPACK_BF16, "=r,=r,=r,=r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _UNPACK_FP16, "=r,=r,=r,=r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        bits = words.to(tl.uint16, bitcast=True)
        return (
            _offset(bits & 15, like),
            _offset((bits >> 4) & 15, like),
            _offset((bits >> 8) & 15, like),
            _offset((bits >> 12) & 15, like),
        )


@triton.jit
def _zero(quant, like: tl.constexpr):
    """Zero points of a group, as `_offset` writes them."""
    return _offset((quant >> 16) & 31, like)[:, None]


@triton.jit
def _add(total, product, quant, scale_type: tl.constexpr):
    """total + product * scale, rounded once; said, so that no compiler may choose per tile."""
    scale = (quant & 0xFFFF).to(tl.uint16).to(scale_type, bitcast=True).to(tl.float32)
    return tl.fma(product, tl.broadcast_to(scale[:, None], product.shape), total)


@triton.jit
def _products(
    x, words, quants, offs_m, offs_n, rows, n, k, split, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    GROUPS: tl.constexpr, SCALE_TYPE: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One split's sum [columns, rows]: levels less zero points are exact small integers, products are added up within
    a group by the tensor core, then scaled in float32."""
    width: tl.constexpr = BLOCK_K // 4
    like: tl.constexpr = x.dtype.element_ty
    blocks = tl.cdiv(k, BLOCK_K)
    share = tl.cdiv(blocks, SPLIT_K)
    chunk = tl.minimum(offs_n // _CHUNK, tl.cdiv(n, _CHUNK) - 1).to(tl.int64) * blocks
    lane = offs_n % _CHUNK
    offs_k = tl.arange(0, width)
    packed = words + (chunk * _CHUNK + lane)[:, None] * width + offs_k[None, :]
    grouped = quants + chunk * (GROUPS * _CHUNK) + lane
    inputs = x + offs_m[:, None].to(tl.int64) * k + offs_k[None, :]
    row = (offs_m < rows)[:, None]
    total = tl.zeros((offs_n.shape[0], offs_m.shape[0]), tl.float32)
    for block in range(tl.minimum(split * share, blocks), tl.minimum(split * share + share, blocks)):
        start = block * BLOCK_K
        w0, w1, w2, w3 = _nibbles(tl.load(packed + block * (_CHUNK * width)), like, ASM)
        in0 = row if EVEN_K else row & (offs_k < k - start)[None, :]
        in1 = row if EVEN_K else row & (offs_k < k - start - width)[None, :]
        in2 = row if EVEN_K else row & (offs_k < k - start - 2 * width)[None, :]
        in3 = row if EVEN_K else row & (offs_k < k - start - 3 * width)[None, :]
        x0 = tl.trans(tl.load(inputs + start, mask=in0, other=0.0))
        x1 = tl.trans(tl.load(inputs + start + width, mask=in1, other=0.0))
        x2 = tl.trans(tl.load(inputs + start + 2 * width, mask=in2, other=0.0))
        x3 = tl.trans(tl.load(inputs + start + 3 * width, mask=in3, other=0.0))
        q0 = tl.load(grouped + block * (GROUPS * _CHUNK))
        q1 = tl.load(grouped + block * (GROUPS * _CHUNK) + _CHUNK)
        if GROUPS == 4:
            q2 = tl.load(grouped + block * (GROUPS * _CHUNK) + 2 * _CHUNK)
            q3 = tl.load(grouped + block * (GROUPS * _CHUNK) + 3 * _CHUNK)
            total = _add(total, tl.dot(w0 - _zero(q0, like), x0), q0, SCALE_TYPE)
            total = _add(total, tl.dot(w1 - _zero(q1, like), x1), q1, SCALE_TYPE)
            total = _add(total, tl.dot(w2 - _zero(q2, like), x2), q2, SCALE_TYPE)
            total = _add(total, tl.dot(w3 - _zero(q3, like), x3), q3, SCALE_TYPE)
        else:
            half = tl.dot(w0 - _zero(q0, like), x0)
            total = _add(total, tl.dot(w1 - _zero(q0, like), x1, half), q0, SCALE_TYPE)
            half = tl.dot(w2 - _zero(q1, like), x2)
            total = _add(total, tl.dot(w3 - _zero(q1, like), x3, half), q1, SCALE_TYPE)
    return total


@triton.jit(do_not_specialize=["rows"])
def linear_int4_kernel(
    x, words, quants, out, bias, residual, partial, counter, rows, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    IN_SEQUENCE: tl.constexpr, GROUPS: tl.constexpr, SCALE_TYPE: tl.constexpr, EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Program (tile, split); see `verify_kernels.gpu.linear_plan`. GROUPS: groups per block of input channels."""
    await_previous()
    m_tiles = tl.cdiv(rows, BLOCK_M)
    offs_m = tl.program_id(0) % m_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) // m_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLIT_K == 1:
        total = _products(
            x, words, quants, offs_m, offs_n, rows, n, k, 0, BLOCK_K, SPLIT_K, GROUPS, SCALE_TYPE, EVEN_K, ASM
        )
        store_tile(total, out, bias, residual, None, None, offs_m, offs_n, rows, n)
    elif IN_SEQUENCE:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLIT_K):
            total += _products(
                x, words, quants, offs_m, offs_n, rows, n, k, split, BLOCK_K, SPLIT_K, GROUPS, SCALE_TYPE, EVEN_K, ASM
            )
        store_tile(total, out, bias, residual, None, None, offs_m, offs_n, rows, n)
    else:
        own = _products(
            x, words, quants, offs_m, offs_n, rows, n, k, tl.program_id(1), BLOCK_K, SPLIT_K, GROUPS, SCALE_TYPE,
            EVEN_K, ASM,
        )  # fmt: skip
        if store_partial(own, partial, counter, SPLIT_K):
            total = reduce_splits(partial, counter, BLOCK_N, BLOCK_M, SPLIT_K)
            store_tile(total, out, bias, residual, None, None, offs_m, offs_n, rows, n)


_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear_int4(
    x: Tensor,
    weight: Int4Weight,
    out: Tensor,
    *,
    workspace: LinearWorkspace,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out = x weight^T + bias + residual, summed in float32 and rounded once.

    x: float16 or bfloat16 [rows, k]; bias: [n]; out, residual: [rows, n], may be the same tensor, but not x; float32,
    float16 or bfloat16 each. A weight with an input order of its own costs one more launch, which orders the rows'
    channels alike.
    """
    rows = x.shape[0]
    launch = plan_launch(rows, weight.n, weight.k, "int4", weight.group)
    if weight.perm is not None:
        assert workspace.permuted is not None  # made for such weights
        x = torch.index_select(x, 1, weight.perm, out=workspace.permuted[: x.numel()].view(x.shape))
    chip = chip_of(x.device)
    linear_int4_kernel[launch.grid](
        x, weight.words, weight.quants, out, bias, residual, workspace.partials, workspace.counters,
        rows, weight.n, weight.k, **launch.constants(), GROUPS=weight.block_k // weight.group,
        SCALE_TYPE=_TRITON_TYPES[weight.scale_type], EVEN_K=weight.k % weight.block_k == 0,
        ASM=x.is_cuda and chip != AMD, **launch_options(launch.options(chip), chip),
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """Every tile, whole and in splits, with all that can be added, for bfloat16 rows and float16 scales in groups of
    any size, and for a k that is a multiple of the block and one that is not. Other types in the usual groups."""
    usual = GROUP_SIZES[-1]
    forms = [("bf16", tl.float16, group) for group in GROUP_SIZES]
    forms += [("fp16", tl.float16, usual), ("bf16", tl.bfloat16, usual)]
    return [
        _case(kind, scale, group, launch, family, even)
        for kind, scale, group in forms
        for launch in launches("int4", group)
        for family in FAMILIES
        for even in (True, False)
    ]


def _case(kind: str, scale: tl.dtype, group: int, launch: LinearLaunch, family: str, even: bool) -> CompileCase:
    return linear_case(
        f"{kind} {scale} scales, group {group}{'' if even else ' ragged'}", linear_int4_kernel, launch, family,
        pointers={"x": kind, "words": "i16", "quants": "i32", "out": kind, "bias": kind, "residual": kind},
        constants={
            "GROUPS": launch.order.block_k // group, "SCALE_TYPE": scale, "EVEN_K": even, "ASM": family != "amd",
        },
    )  # fmt: skip
