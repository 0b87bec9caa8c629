"""Weights in the layouts that the fp8 and int4 kernels read, made once, when a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify_kernels.gpu.kernel_launch import FP8, FP8_LARGEST
from verify_kernels.gpu.linear_plan import block_k_of

ROWS_AT_ONCE = 512  # rows of which float32 copies are held; a multiple of `CHUNK`


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [n, k], floating-point, as float8_e4m3fn [n, k] and float32 [n]: weight[i] ~ q[i] * scale[i],
    scale = max|weight[i]| / 448; a channel of zeros has scale 1. All values must be finite.
    """
    q = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], ROWS_AT_ONCE):
        part = weight[start : start + ROWS_AT_ONCE].float()
        largest = part.abs().amax(dim=1)
        own = torch.where(largest > 0, largest / FP8_LARGEST, torch.ones_like(largest))
        scale[start : start + ROWS_AT_ONCE] = own
        q[start : start + ROWS_AT_ONCE] = (part / own[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(q.dtype)
    return q, scale


CHUNK = 64  # output channels that lie together
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w[i, perm[j]] = (level[i, j] - zero[i, g]) * scale[i, g] with g = j // group, packed.

    Blocks of ``CHUNK`` channels x ``block_k`` inputs lie one after the other along the inputs, so that a program reads
    one stream; padding is zero. block_k is 4 * width: input start + i * width + j is nibble i, counted from the lowest,
    of word j.
    """

    n: int
    k: int
    group: int  # inputs that share a scale and a zero point
    words: Tensor  # int16 [chunks, blocks, CHUNK, width]
    quants: Tensor  # int32 [chunks, blocks, block_k / group, CHUNK]: the scale's 16 bits, above them the zero point
    scale_type: torch.dtype  # float16 or bfloat16
    perm: Tensor | None  # int32 [k], the input channel at each place; None: in order

    @property
    def block_k(self) -> int:
        """Input channels per block."""
        return 4 * self.words.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes one pass reads."""
        return self.words.numel() * 2 + self.quants.numel() * 4

    def to(self, device: torch.device) -> Int4Weight:
        """The same on ``device``."""
        perm = None if self.perm is None else self.perm.to(device)
        return replace(self, words=self.words.to(device), quants=self.quants.to(device), perm=perm)


def pack_int4(levels: Tensor, scales: Tensor, zeros: Tensor, group: int, perm: Tensor | None = None) -> Int4Weight:
    """Pack a quantised matrix.

    levels: uint8 [n, k], 0 to 15, input channels in the order of their groups. scales: float16 or bfloat16
    [n, ceil(k / group)]. zeros: uint8 like scales, 0 to 16 (the first GPTQ format stores it less one).
    group: of `GROUP_SIZES`. perm: integers [k], the input channel that stands at each place. On any one device.
    """
    (n, k), block = levels.shape, block_k_of("int4", group)
    chunks, blocks, per_block = -(-n // CHUNK), -(-k // block), block // group
    padded = torch.zeros((chunks * CHUNK, blocks * block), dtype=torch.int32, device=levels.device)
    padded[:n, :k] = levels
    nibbles = padded.view(chunks, CHUNK, blocks, 4, block // 4).permute(0, 2, 1, 3, 4)
    shifts = torch.arange(0, 16, 4, dtype=torch.int32, device=levels.device)[:, None]
    words = (nibbles << shifts).sum(dim=3, dtype=torch.int32)
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).contiguous()
    merged = (scales.view(torch.int16).to(torch.int32) & 0xFFFF) | zeros.to(torch.int32) << 16
    quants = torch.zeros((chunks * CHUNK, blocks * per_block), dtype=torch.int32, device=levels.device)
    quants[:n, : merged.shape[1]] = merged
    quants = quants.view(chunks, CHUNK, blocks, per_block).permute(0, 2, 3, 1).contiguous()
    return Int4Weight(n, k, group, words, quants, scales.dtype, None if perm is None else perm.to(torch.int32))


def unpack_int4(weight: Int4Weight) -> Tensor:
    """The float32 matrix [n, k] that ``weight`` stands for, input channels in their own order."""
    chunks, blocks, _, width = weight.words.shape
    words = weight.words.to(torch.int32)
    levels = torch.stack([(words >> shift) & 15 for shift in (0, 4, 8, 12)], dim=3)
    levels = levels.permute(0, 2, 1, 3, 4).reshape(chunks * CHUNK, blocks * 4 * width)
    quants = weight.quants.permute(0, 3, 1, 2).reshape(chunks * CHUNK, -1)
    scales = (quants & 0xFFFF).to(torch.int16).view(weight.scale_type).float()
    matrix = (levels - _spread(quants >> 16, weight)) * _spread(scales, weight)
    matrix = matrix[: weight.n, : weight.k]
    if weight.perm is None:
        return matrix
    return torch.empty_like(matrix).index_copy_(1, weight.perm.long(), matrix)


def _spread(values: Tensor, weight: Int4Weight) -> Tensor:
    """Values by group as values by input channel."""
    return values.repeat_interleave(weight.group, dim=1)


def stack_int4(weights: Sequence[Int4Weight]) -> Int4Weight:
    """Weights stacked along their outputs, as one layer.

    They have the same inputs in the same order, groups and scales' type; all but the last have a multiple of `CHUNK`
    outputs.
    """
    words, quants = torch.cat([w.words for w in weights]), torch.cat([w.quants for w in weights])
    return replace(weights[0], n=sum(w.n for w in weights), words=words, quants=quants)
