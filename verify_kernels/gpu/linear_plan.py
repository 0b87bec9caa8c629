"""A linear layer's order of summation, tile and grid, from shapes alone, and its scratch.

The order of additions follows from the weight's shape and type (`reduction_order`), never from the rows. The tile
follows from the rows and does not change the order. So a row has the same bits in any batch and in any tile.

A weight so narrow that its column tiles leave multiprocessors idle runs as split-K: input channels are cut into a
number of splits that depends on the weight alone, each program of a tile stores a partial sum, and the last program
reduces them in order. With enough rows to fill the chip, one program computes all splits in sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verify_kernels.gpu.kernel_launch import FP8, SMALL, CompileCase


@dataclass(frozen=True, slots=True)
class LinearOrder:
    """The order of additions, which follows from the weight alone.

    Within a split products are added in order, by one kind of instruction; the splits' sums are then added in order.
    """

    block_k: int  # input channels of a block
    split_k: int  # splits, each a run of consecutive blocks


@dataclass(frozen=True, slots=True)
class LinearTile:
    """The tile of a program.

    The weight is the first operand of the product and the rows are the second, so the tensor core's wide side lies
    along the output channels. With block_n a multiple of 64 and num_warps of 4, every tile compiles to the same kind
    of instruction on Hopper (wgmma m64), for 1 row as for 2048.
    """

    block_m: int  # rows
    block_n: int  # output channels
    num_warps: int
    num_stages: int  # depth of the load pipeline
    small_stages: int  # the same, on chips of `SMALL`


AMD = "gfx942"  # of `CHIPS`; pipelines deeper than two do not fit its 64 KiB of shared memory
# Chips for which a launch has the same options
FAMILIES = {"nvidia": ("sm_80", "sm_90"), "sm_100": ("sm_100",), "small": SMALL, "amd": (AMD,)}


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """A launch of a linear kernel."""

    order: LinearOrder
    tile: LinearTile
    m_tiles: int  # tiles of rows
    n_tiles: int  # tiles of output channels
    in_sequence: bool  # whether one program computes all splits of its tile; the sums and their order are the same

    @property
    def grid(self) -> tuple[int, int]:
        """Programs: tiles, rows fastest, so that programs that share weights run together; then splits."""
        return self.m_tiles * self.n_tiles, 1 if self.in_sequence else self.order.split_k

    @property
    def counters(self) -> int:
        """Int32 counters that the launch needs, all zero."""
        return self.m_tiles * self.n_tiles if self.grid[1] > 1 else 0

    @property
    def partials(self) -> int:
        """Float32 values of scratch that the launch needs."""
        return self.counters * self.order.split_k * self.tile.block_m * self.tile.block_n

    def constants(self) -> dict[str, int | bool]:
        """Constexpr arguments that all linear kernels have."""
        return {
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "BLOCK_K": self.order.block_k,
            "SPLIT_K": self.order.split_k,
            "IN_SEQUENCE": self.in_sequence,
        }

    def options(self, chip: str) -> dict[str, int]:
        """Launch options on one of `CHIPS`. On AMD they fix the instruction's shape, which triton would choose by the
        tile's."""
        tile = self.tile
        if chip == AMD:
            return {"num_warps": tile.num_warps, "num_stages": min(tile.num_stages, 2), "matrix_instr_nonkdim": 16}
        # With four warps splits of 64 rows spill on Blackwell.
        warps = 8 if chip == "sm_100" and tile.block_m >= 64 else tile.num_warps
        return {"num_warps": warps, "num_stages": tile.small_stages if chip in SMALL else tile.num_stages}


LinearKind = Literal["bf16", "fp16", "fp32", "fp8", "int4"]
DENSE_KINDS: dict[torch.dtype, LinearKind] = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8",
}  # fmt: skip
FULL_CHIP = 96  # programs that keep the memory of a chip of 108 to 152 multiprocessors busy
AT_ONCE = 264  # programs that run at once, two on each of 132 multiprocessors
SPLITS = (1, 2, 4, 8)  # split counts that are compiled
ALIGNED = 16  # k must be a multiple of it for wide loads, without which larger tiles run out of registers

# 128 bytes of a weight row per block: whole cache lines, one swizzle atom of wgmma.
_BLOCK_K: dict[LinearKind, int] = {"bf16": 64, "fp16": 64, "fp32": 32, "fp8": 128, "int4": 256}

# The least blocks of a split: 512 input channels for most kinds. With fewer, start-up dominates; with more of int4's
# wide blocks, half a chip would be idle on the layers of an 8B model.
MIN_BLOCKS: dict[LinearKind, int] = {"bf16": 8, "fp16": 8, "fp32": 8, "fp8": 4, "int4": 2}

# For up to 64 rows there are two tiles of each height. The first has a deep pipeline and is for weights whose programs
# all run at once. The second is for more programs: several share a multiprocessor, or each reuses more of its rows.
_DENSE = (
    LinearTile(16, 64, 4, 9, 9), LinearTile(16, 64, 4, 5, 5), LinearTile(32, 64, 4, 7, 7),
    LinearTile(32, 128, 8, 5, 4), LinearTile(64, 64, 4, 7, 6), LinearTile(64, 128, 8, 4, 4),
    LinearTile(128, 128, 8, 4, 3),
)  # fmt: skip
_TILES: dict[LinearKind, tuple[LinearTile, ...]] = {
    "bf16": _DENSE,
    "fp16": _DENSE,
    "fp8": _DENSE,
    "fp32": (LinearTile(32, 64, 4, 2, 2),),  # interpreted alone; one shape, as how a CPU's BLAS adds depends on it
    "int4": (LinearTile(16, 128, 8, 4, 3), LinearTile(32, 128, 8, 3, 2), LinearTile(64, 128, 8, 3, 2)),
}


def tiles_of(kind: LinearKind) -> tuple[LinearTile, ...]:
    """Every tile a weight of ``kind`` may get, by rising rows; of one height first the one for few programs."""
    return _TILES[kind]


def block_k_of(kind: LinearKind, group: int) -> int:
    """Input channels per step. For int4 four nibbles of a word are one step, and none may straddle a ``group``."""
    return 4 * min(64, group) if kind == "int4" else _BLOCK_K[kind]


def reduction_order(n: int, k: int, kind: LinearKind, group: int = 128) -> LinearOrder:
    """The order of additions of an [n, k] weight, with the fewest splits that make `FULL_CHIP` programs."""
    block_k = block_k_of(kind, group)
    columns, blocks = -(-n // _TILES[kind][0].block_n), -(-k // block_k)
    allowed = [split for split in SPLITS if split == 1 or blocks >= split * MIN_BLOCKS[kind]]
    enough = [split for split in allowed if columns * split >= FULL_CHIP]
    return LinearOrder(block_k, enough[0] if enough else allowed[-1])


def in_sequence_fits(kind: LinearKind, group: int) -> bool:
    """Whether one program can compute all splits: with scales for every 64 channels some chips run out of registers."""
    return kind != "int4" or group > 64


def plan_launch(rows: int, n: int, k: int, kind: LinearKind, group: int = 128) -> LinearLaunch:
    """The launch for [rows, k] x [n, k]^T."""
    order = reduction_order(n, k, kind, group)
    tiles = _TILES[kind] if k % ALIGNED == 0 else _TILES[kind][:1]
    height = next((tile.block_m for tile in tiles if tile.block_m >= rows), tiles[-1].block_m)
    m_tiles = -(-rows // height)
    alike = [tile for tile in tiles if tile.block_m == height]
    tile = next((t for t in alike if m_tiles * -(-n // t.block_n) * order.split_k <= AT_ONCE), alike[-1])
    n_tiles = -(-n // tile.block_n)
    full = rows > tile.block_m and m_tiles * n_tiles >= FULL_CHIP
    in_sequence = full and order.split_k > 1 and in_sequence_fits(kind, group)
    return LinearLaunch(order, tile, m_tiles, n_tiles, in_sequence)


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Scratch that launches of layers that it was made for share, on one stream."""

    partials: Tensor  # float32, partial sums of split-K
    counters: Tensor  # int32, finished splits of each tile; every launch leaves zeros
    permuted: Tensor | None  # rows with their channels in the order of an act-order weight

    @classmethod
    def for_layers(
        cls,
        layers: Iterable[tuple[int, int, LinearKind, int]],
        max_rows: int,
        device: torch.device,
        permuted: torch.dtype | None = None,
    ) -> LinearWorkspace:
        """Scratch for up to ``max_rows`` rows of every layer (n, k, kind, group); group matters for int4 only.

        permuted: the rows' type if a layer has an input order of its own.
        """
        partials = counters = width = 1
        for n, k, kind, group in layers:
            width = max(width, k)
            step = tiles_of(kind)[0].block_m
            for rows in range(step, max_rows + step, step):
                launch = plan_launch(rows, n, k, kind, group)
                partials, counters = max(partials, launch.partials), max(counters, launch.counters)
        return cls(
            torch.empty(partials, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
            None if permuted is None else torch.empty(max_rows * width, dtype=permuted, device=device),
        )


def launches(kind: LinearKind, group: int = 128) -> list[LinearLaunch]:
    """Every tile with one split, with splits side by side, and, for the largest tile, one after the other."""
    block_k, tiles = block_k_of(kind, group), tiles_of(kind)
    side_by_side = [LinearLaunch(LinearOrder(block_k, s), tile, 1, 1, False) for tile in tiles for s in SPLITS]
    splits = [s for s in SPLITS if s > 1 and in_sequence_fits(kind, group)]
    return side_by_side + [LinearLaunch(LinearOrder(block_k, s), tiles[-1], 1, 1, True) for s in splits]


def linear_case(
    name: str,
    kernel: Any,
    launch: LinearLaunch,
    family: str,
    *,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: bool = True,
) -> CompileCase:
    """The compile case of ``kernel`` in ``launch`` for one of `FAMILIES`.

    pointers: types of its own. aligned: k is a multiple of 16.
    """
    tile, split_k = launch.tile, launch.order.split_k
    splits = f" {'sequence' if launch.in_sequence else 'split'} {split_k}" if split_k > 1 else ""
    return CompileCase.of(
        f"{name} {tile.block_m}x{tile.block_n} by {tile.num_stages}{splits} {family}",
        kernel,
        {**launch.constants(), **constants},
        {name: f"*{kind}" for name, kind in pointers.items()},
        divisible=("n", "k") if aligned else ("n",),
        options=launch.options(FAMILIES[family][0]),
        targets=FAMILIES[family],
    )
