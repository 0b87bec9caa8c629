"""Weights of a linear layer in the layout the kernels read, and how a plain matrix becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verify_kernels.hadamard import rotate

TILE_N = 32  # output channels per tile: two AVX-512 registers of int32, so that 12 rows fit beside them
GROUP_K = 4  # input channels one int8 dot-product instruction consumes

WeightKind = Literal["int8", "bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """y = x W^T + b, packed.

    data: int8  -> uint8  [tiles, k_pad/4, 32, 4]: round(rotate(w) / scale) + 128, so padding is 128; the inputs are
                   rotated alike (`verify_kernels.hadamard`).
          bf16  -> bfloat16 [tiles, k, 32]
          fp32  -> float32  [tiles, k, 32]
    scale: float32 [tiles * 32] per output channel (int8 only, else None); 0 in padded channels.
    bias:  float32 [tiles * 32] or None.
    """

    kind: WeightKind
    n: int
    k: int
    data: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return self.data.numel() * self.data.element_size()

    @property
    def tiles(self) -> int:
        """Number of 32-channel tiles."""
        return self.data.shape[0]


def pack_linear(weight: Tensor, bias: Tensor | None, kind: WeightKind) -> PackedLinear:
    """Pack ``weight`` [n, k] float32 and ``bias`` [n] or None.

    int8 is symmetric per output channel of the rotated matrix: scale = max|w| / 127, round half to even.

    Raises:
        ValueError: ``weight`` is not a float32 matrix, or ``bias`` does not fit it.
    """
    if weight.ndim != 2 or weight.dtype != torch.float32:
        raise ValueError(f"weight: must be a float32 matrix, got {weight.dtype} {tuple(weight.shape)}")
    n, k = weight.shape
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias: must have {n} entries, got {tuple(bias.shape)}")
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


def unpack_linear(packed: PackedLinear) -> Tensor:
    """The float32 matrix [n, k] that ``packed`` stands for (dequantised for int8)."""
    if packed.kind != "int8":
        return packed.data.float().transpose(1, 2).reshape(-1, packed.k)[: packed.n]
    assert packed.scale is not None
    tiles, groups, _, _ = packed.data.shape
    ints = packed.data.float().sub_(128.0).transpose(1, 2).reshape(tiles * TILE_N, groups * GROUP_K)
    return rotate((ints * packed.scale[:, None])[: packed.n, : packed.k])
