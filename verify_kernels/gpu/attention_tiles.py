"""How tree attention is cut on a chip: what decides the bits of a result, and what only decides its speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HEAD_DIMS = (64, 80, 96, 128, 256)
TILE = 64  # keys of a tile: one page
SEGMENT_TILES = 4
CHIPS = ("sm_80", "sm_90", "sm_100", "gfx942")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One way to run the kernels.

    A result's bits depend on ``lanes`` (keys per matrix product; divides 64), ``seg_tiles``, ``fold_segs`` and on the
    kind of matrix instruction, so these follow from chip, head size, KV type and window alone. block_m, warps,
    stages and resident (programs per multiprocessor) may follow from anything.
    """

    block_m: int
    lanes: int
    seg_tiles: int
    fold_segs: int
    warps: int
    stages: int
    resident: int


def chip_of(device: torch.device) -> str:
    """The chip whose tiles fit ``device``; the CPU, on which kernels are interpreted, takes those of the H200."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100")


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; of the CPU a few, so that interpreted programs take several items each."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def attention_tile(
    chip: str, head_dim: int, kv_dtype: torch.dtype, *, windowed: bool = False, wide: bool = False
) -> AttentionTile:
    """The tile for a head size and KV type on one of `CHIPS`; ``wide``: many rows per entry, as in prefill.

    The segment is 256 keys: 32 of them keep an H200 busy at batch 1 with 8k of context and 8 KV heads, and each
    costs a row its partial sum, head_dim + 2 floats. A block is 4 segments, folded in registers where there is enough
    other work, which leaves a quarter of these. At head_dim 256 registers do not hold both sums: blocks are segments.
    """
    large = head_dim > 128
    wide = wide and chip == "sm_90" and not large
    fp8 = kv_dtype == FP8
    if chip == "gfx942":
        lanes, warps = 16 if windowed else 32, 8 if large and windowed else 4
        return AttentionTile(64, lanes, SEGMENT_TILES, 1, warps, 1, 1 if large else 2)
    if chip == "sm_80" and windowed and head_dim > 64 and not large:
        return AttentionTile(64, 64, SEGMENT_TILES, 4, 8, 3, 1)
    if chip == "sm_100":
        return AttentionTile(64, 32 if large else 64, SEGMENT_TILES, 1 if large else 4, 8, 3, 1)
    if large:
        return AttentionTile(64, 32, SEGMENT_TILES, 1, 8, 2 if kv_dtype == torch.float32 else 3, 1)
    lanes = 32 if windowed and fp8 else 64
    stages = 2 if kv_dtype == torch.float32 else 4 if fp8 or head_dim == 64 else 3
    if chip == "sm_80" and head_dim > 64 and not fp8:
        stages = 2  # of three, two programs do not fit in an A100's 164 KiB
    return AttentionTile(
        128 if wide else 64, lanes, SEGMENT_TILES, 4, 8 if wide else 4, stages, 1 if wide else 2
    )  # fmt: skip
