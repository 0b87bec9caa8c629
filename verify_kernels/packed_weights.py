"""Packs a linear layer's weights into the layout of the CPU kernels.

Before rounding to int8 a layer's inputs are rotated, which spreads outliers: x W^T = (x R)(W R)^T for any orthogonal R.
A few input channels of a transformer are a hundred times larger than the others, and one scale per 256 channels then
rounds the others to 0; after a Hadamard rotation all have about the same size (the idea of QuaRot, arXiv 2404.00456,
here per block of 256, so that it costs eight additions a channel). The rotation is row-local and its own inverse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verify_kernels.quant_formats import FORMATS, BlockMatrix, pack_blocks, unpack_blocks

BLOCK = 256  # input channels that are rotated together


def rotate(x: Tensor) -> Tensor:
    """``x`` [..., width] float32, every block of its last dimension times the Hadamard matrix over sqrt(size).

    Blocks of 256, then of falling powers of two.
    """
    parts = []
    width = x.shape[-1]
    start = width // BLOCK * BLOCK
    if start:
        # H256 = H16 (x) H16: two small products instead of one of 256 x 256.
        small = _matrix(16)
        square = x[..., :start].reshape(-1, 16, 16)
        parts.append((small @ square @ small).reshape(*x.shape[:-1], start))
    while start < width:
        size = 1 << ((width - start).bit_length() - 1)
        parts.append(x[..., start : start + size] @ _matrix(size))
        start += size
    return torch.cat(parts, dim=-1)


@functools.cache
def _matrix(size: int) -> Tensor:
    """The symmetric Sylvester-Hadamard matrix of ``size``, orthonormal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


TILE_N = 32  # output channels per tile: two AVX-512 registers of int32, which leaves registers for 12 rows
GROUP_K = 4  # input channels of one int8 dot-product instruction
CHUNK_K = 256  # input channels per scale of activations for int8 weights

DraftKind = Literal["q4_0", "q3_0"]  # block formats that a draft model's floats are rounded to
FITS: dict[DraftKind, tuple[float, ...]] = {  # ratios of a group's largest weight to its scale that are tried
    "q4_0": (7.1, 7.4, 7.7, 8.0, 8.3, 8.6, 8.9),
    "q3_0": (3.4, 3.7, 4.0, 4.3, 4.6, 4.9, 5.2),
}
BlockKind = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "u4_32", "u4_64", "u4_128", "q3_0"]
RoundedKind = Literal["int8", "bf16", "fp32"]  # forms that floats are packed to
WeightKind = RoundedKind | BlockKind


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """y = x W^T + b, packed.

    Data by kind: int8 is uint8 [tiles, k_pad / 4, 32, 4], round(rotate(w) / scale) + 128, so padding is 128; bf16 is
    bfloat16 and fp32 float32 [tiles, k, 32]; block formats (`verify_kernels.quant_formats`) are uint8 [tiles, units, 2,
    bytes].
    """

    kind: WeightKind
    n: int  # output channels
    k: int  # input channels
    data: Tensor
    scale: Tensor | None  # float32 [tiles * 32] per output channel, 0 in padding; of int8
    bias: Tensor | None  # float32 [tiles * 32]
    order: Tensor | None = None  # int32 [k], the input at each place; of block formats

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return self.data.numel() * self.data.element_size()

    @property
    def tiles(self) -> int:
        """Number of 32-channel tiles."""
        return self.data.shape[0]

    def part(self, index: int, parts: int) -> PackedLinear:
        """One of ``parts`` matrices that lie one after the other in whole tiles, without a bias; shares the memory."""
        tiles, n = slice(index * self.tiles // parts, (index + 1) * self.tiles // parts), self.n // parts
        scale = None if self.scale is None else self.scale[index * n : (index + 1) * n]
        return replace(self, n=n, data=self.data[tiles], scale=scale)


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """A fused linear layer whose parts, stacked along the outputs, are of different kinds."""

    parts: tuple[PackedLinear, ...]

    @property
    def n(self) -> int:
        """Output channels."""
        return sum(part.n for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return sum(part.nbytes for part in self.parts)


HostLinear = PackedLinear | StackedLinear
Embedding = Tensor | PackedLinear
"""Float16 or float32 [vocab, hidden], or a matrix in blocks with a row per token."""


def pack_linear(weight: Tensor, bias: Tensor | None, kind: RoundedKind) -> PackedLinear:
    """Pack ``weight`` [n, k] float32 and ``bias`` [n] or None.

    int8 is symmetric per output channel of the rotated matrix: scale = max|w| / 127, round half to even.
    """
    n, k = weight.shape
    tiles = -(-n // TILE_N)
    packed_bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, tiles * TILE_N - n)).contiguous()
    if kind == "int8":
        data, scale = _pack_int8(weight, tiles)
        return PackedLinear(kind, n, k, data, scale, packed_bias)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    data = torch.zeros((tiles, k, TILE_N), dtype=dtype)
    for t in range(tiles):  # tile by tile: a whole-matrix transpose would double peak memory
        rows = weight[t * TILE_N : (t + 1) * TILE_N]
        data[t, :, : rows.shape[0]] = rows.t()
    return PackedLinear(kind, n, k, data, None, packed_bias)


def pack_block_linear(raw: Tensor, bias: Tensor | None, kind: BlockKind, k: int) -> PackedLinear:
    """Repack ``raw`` uint8 [n, bytes of a row of k inputs in whole blocks] and ``bias`` [n] or None."""
    data = torch.from_numpy(pack_blocks(raw.numpy(), kind))
    padded = None if bias is None else torch.nn.functional.pad(bias.float(), (0, data.shape[0] * TILE_N - len(bias)))
    return PackedLinear(kind, len(raw), k, data, None, padded)


RoundBlocks = Callable[[Tensor, DraftKind], Tensor]
"""`round_blocks`, or its native twin."""


def round_blocks(weight: Tensor, kind: DraftKind) -> Tensor:
    """``weight`` float32 [n, k], k a multiple of 32, rounded to blocks of ``kind``: uint8 [n, bytes of a row].

    The largest of 32 weights is about -8 times the scale (Q3_0: -4). Of a few scales, each fitted to the levels that it
    leads to, the one with the least squared error is taken.
    """
    most = FORMATS[kind].offset
    groups = weight.unflatten(1, (-1, 32))
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    safe = torch.where(extreme != 0, extreme, 1.0)
    best = torch.full_like(extreme, torch.inf)
    scale, levels = torch.zeros_like(extreme), torch.zeros_like(groups)
    for steps in FITS[kind]:
        rounded = (groups * (-steps / safe)).round_().clamp_(-most, most - 1)
        fitted = (groups * rounded).sum(2, keepdim=True) / rounded.square().sum(2, keepdim=True).clamp_min(1.0)
        fitted = fitted.half().float()
        error = (groups - rounded * fitted).square_().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, fitted, scale)
        levels = torch.where(better, rounded, levels)
    stored = levels.add_(most).to(torch.uint8)
    if kind == "q4_0":
        stored = stored[..., :16] | stored[..., 16:] << 4
    else:
        bits = np.unpackbits(stored.numpy()[..., None], axis=-1, count=3, bitorder="little")
        stored = torch.from_numpy(np.packbits(bits.reshape(*stored.shape[:2], -1), axis=-1, bitorder="little"))
    return torch.cat((scale.half().view(torch.uint8), stored), dim=2).flatten(1)


def block_matrix(packed: PackedLinear) -> BlockMatrix:
    """A matrix in a block format, unpacked."""
    return unpack_blocks(packed.data.numpy(), packed.kind, packed.n, packed.k)


def embedding_rows(table: Embedding, ids: Tensor) -> Tensor:
    """Rows ``ids`` int64 [n] of ``table``, float32 [n, hidden]."""
    if isinstance(table, Tensor):
        return table[ids].float()
    tiles = replace(table, n=len(ids) * TILE_N, data=table.data[ids // TILE_N])
    return unpack_linear(tiles)[torch.arange(len(ids)) * TILE_N + ids % TILE_N]


def _pack_int8(weight: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    k = weight.shape[1]
    k_pad = -(-k // GROUP_K) * GROUP_K
    scale = torch.zeros(tiles * TILE_N)
    data = torch.empty((tiles, k_pad // GROUP_K, TILE_N, GROUP_K), dtype=torch.uint8)
    padded = torch.zeros((TILE_N, k_pad))
    for t in range(tiles):
        rows = rotate(weight[t * TILE_N : (t + 1) * TILE_N])
        row_scale = rows.abs().amax(dim=1) / 127.0
        scale[t * TILE_N : t * TILE_N + rows.shape[0]] = row_scale
        padded.zero_()
        padded[: rows.shape[0], :k] = rows / torch.where(row_scale > 0, row_scale, 1.0)[:, None]
        quantised = padded.round_().add_(128.0).to(torch.uint8)
        data[t] = quantised.view(TILE_N, k_pad // GROUP_K, GROUP_K).transpose(0, 1)
    return data, scale


def unpack_linear(packed: HostLinear) -> Tensor:
    """``packed`` as a float32 matrix [n, k], dequantised if it is quantised."""
    if isinstance(packed, StackedLinear):
        return torch.cat([unpack_linear(part) for part in packed.parts])
    if packed.kind in FORMATS:
        plain = torch.from_numpy(block_matrix(packed).dequantised())
        return plain if packed.order is None else plain[:, packed.order.argsort()]
    if packed.kind != "int8":
        return packed.data.float().transpose(1, 2).reshape(-1, packed.k)[: packed.n]
    assert packed.scale is not None
    tiles, groups, _, _ = packed.data.shape
    ints = packed.data.float().sub_(128.0).transpose(1, 2).reshape(tiles * TILE_N, groups * GROUP_K)
    return rotate((ints * packed.scale[:, None])[: packed.n, : packed.k])
