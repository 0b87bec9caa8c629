"""Which order, tile and grid a linear layer gets: tables in code, from shapes and host-known row counts alone.

The order of additions comes from the weight's shape and type (`reduction_order`), never from the rows. The tile comes
from the rows and does not touch the order. So a row has the same bits alone, in any company and in any tile. Where a
weight is so narrow that its column tiles leave multiprocessors idle, its input channels are split, always by the same
number; with enough rows to fill the chip, one program computes the splits one after the other.
"""

from __future__ import annotations

from typing import Literal

from verify_kernels.gpu.linear_launch import LinearLaunch
from verify_kernels.gpu.linear_order import LinearOrder
from verify_kernels.gpu.linear_tile import LinearTile

LinearKind = Literal["bf16", "fp16", "fp32", "fp8", "int4"]
LinearMode = Literal["bitwise", "fastest"]

MODES: tuple[LinearMode, ...] = ("bitwise", "fastest")
FASTEST_ROWS = 64  # from here on "fastest" may differ from "bitwise"; below, weights' bytes are all that counts
FULL_CHIP = 96  # programs that keep the memory of a chip of 108 to 152 multiprocessors busy
SPLITS = (1, 2, 4, 8)
ALIGNED = 16  # what k must be a multiple of for wide loads; without them larger tiles run out of registers
COLUMNS = 128  # the tile width by which splits are counted

# 128 bytes of a weight row per block: whole cache lines, one swizzle atom of wgmma.
_BLOCK_K: dict[LinearKind, int] = {"bf16": 64, "fp16": 64, "fp32": 32, "fp8": 128, "int4": 256}

# Blocks that a split has at least: 512 input channels of most kinds. Fewer would be all start-up; but asking for more
# of the wide blocks of int4 would leave half a chip idle on the layers of an 8B model.
MIN_BLOCKS: dict[LinearKind, int] = {"bf16": 8, "fp16": 8, "fp32": 8, "fp8": 4, "int4": 2}

# Two or more programs of up to 64 rows fit on a multiprocessor; together they keep over 100 KB on its way.
_DENSE = (LinearTile(16, 64, 4, 5), LinearTile(32, 128, 8, 5), LinearTile(64, 128, 8, 4), LinearTile(128, 128, 8, 4))
_TILES: dict[LinearKind, tuple[LinearTile, ...]] = {
    "bf16": _DENSE,
    "fp16": _DENSE,
    "fp8": _DENSE,
    "fp32": (LinearTile(32, 64, 4, 2),),  # one shape: how a CPU's BLAS adds depends on it, and so does the interpreter
    "int4": (LinearTile(16, 128, 8, 4), LinearTile(32, 128, 8, 3), LinearTile(64, 128, 8, 3)),
}


def tiles_of(kind: LinearKind) -> tuple[LinearTile, ...]:
    """Every tile a weight of ``kind`` may get, by rising rows."""
    return _TILES[kind]


def block_k_of(kind: LinearKind, group: int) -> int:
    """Input channels per step. For int4 four nibbles of a word are one step, and none may straddle a ``group``."""
    return 4 * min(64, group) if kind == "int4" else _BLOCK_K[kind]


def reduction_order(n: int, k: int, kind: LinearKind, group: int = 128) -> LinearOrder:
    """The order of additions of an [n, k] weight: the least of `SPLITS` that makes `FULL_CHIP` programs."""
    block_k = block_k_of(kind, group)
    columns, blocks = -(-n // COLUMNS), -(-k // block_k)
    allowed = [split for split in SPLITS if split == 1 or blocks >= split * MIN_BLOCKS[kind]]
    enough = [split for split in allowed if columns * split >= FULL_CHIP]
    return LinearOrder(block_k, enough[0] if enough else allowed[-1])


def in_sequence_fits(kind: LinearKind, group: int) -> bool:
    """Whether one program can compute all splits: with scales for every 32 channels a B200 runs out of registers."""
    return kind != "int4" or group > 32


def plan_launch(
    rows: int, n: int, k: int, kind: LinearKind, group: int = 128, mode: LinearMode = "bitwise"
) -> LinearLaunch:
    """How to run [rows, k] x [n, k]^T. "fastest" drops the splits once the rows alone fill the chip."""
    order = reduction_order(n, k, kind, group)
    tiles = _TILES[kind] if k % ALIGNED == 0 else _TILES[kind][:1]
    tile = next((tile for tile in tiles if tile.block_m >= rows), tiles[-1])
    m_tiles, n_tiles = -(-rows // tile.block_m), -(-n // tile.block_n)
    full = rows > tile.block_m and m_tiles * n_tiles >= FULL_CHIP
    if full and mode == "fastest":
        order = LinearOrder(order.block_k, 1)
    in_sequence = full and order.split_k > 1 and in_sequence_fits(kind, group)
    return LinearLaunch(order, tile, m_tiles, n_tiles, in_sequence)
