"""Which order of summation, tile and grid a linear layer gets, from shapes alone, and the scratch it needs.

The order of additions comes from the weight's shape and type (`reduction_order`), never from the rows. The tile comes
from the rows and does not touch the order. So a row has the same bits in any batch and in any tile.

Where a weight is so narrow that its column tiles leave multiprocessors idle, it runs as split-K: input channels are cut
into a number of splits that depends on the weight alone, each program of a tile stores a partial sum, and the one that
comes last reduces them in order. With enough rows to fill the chip one program computes all splits in sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verify_kernels.gpu.kernel_launch import ROW_TYPES, CompileCase, check_rank, check_tensor


@dataclass(frozen=True, slots=True)
class LinearOrder:
    """All that the bits of a result depend on besides the numbers themselves; a function of the weight alone.

    Input channels are taken in blocks of ``block_k``; the blocks are dealt to ``split_k`` runs of consecutive ones.
    Within a run products are added in order, by one kind of instruction; the runs' sums are then added in order.
    """

    block_k: int
    split_k: int


@dataclass(frozen=True, slots=True)
class LinearTile:
    """``block_m`` rows by ``block_n`` output channels, on ``num_warps`` warps, loads ``num_stages`` deep.

    The weight is the first operand of the product and the rows are the second, so the tensor core's wide side lies
    along the output channels. With block_n a multiple of 64 and num_warps of 4, every tile compiles to the same kind
    of instruction on Hopper (wgmma m64), for 1 row as for 2048.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_AMD_STAGES = 2  # deeper pipelines do not fit the 64 KiB of shared memory


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """``m_tiles`` x ``n_tiles`` tiles; ``in_sequence``: one program computes all splits of its tile, one after the
    other, instead of one program each. Both add the same sums in the same order."""

    order: LinearOrder
    tile: LinearTile
    m_tiles: int
    n_tiles: int
    in_sequence: bool

    @property
    def grid(self) -> tuple[int, int]:
        """Programs: row tiles fastest, so that those that share weights run together; then splits."""
        return self.m_tiles * self.n_tiles, 1 if self.in_sequence else self.order.split_k

    @property
    def counters(self) -> int:
        """Int32 counters the launch needs, all zero."""
        return self.m_tiles * self.n_tiles if self.grid[1] > 1 else 0

    @property
    def partials(self) -> int:
        """Float32 values of scratch the launch needs."""
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

    def options(self, amd: bool) -> dict[str, int]:
        """Launch options. On AMD the instruction's shape is pinned: triton would choose it by the tile's."""
        if amd:
            stages = min(self.tile.num_stages, _AMD_STAGES)
            return {"num_warps": self.tile.num_warps, "num_stages": stages, "matrix_instr_nonkdim": 16}
        return {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages}


LinearKind = Literal["bf16", "fp16", "fp32", "fp8", "int4"]
DENSE_KINDS: dict[torch.dtype, LinearKind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
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
    "fp32": (LinearTile(32, 64, 4, 2),),  # interpreted alone; one shape, as how a CPU's BLAS adds depends on it
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


def plan_launch(rows: int, n: int, k: int, kind: LinearKind, group: int = 128) -> LinearLaunch:
    """How to run [rows, k] x [n, k]^T."""
    order = reduction_order(n, k, kind, group)
    tiles = _TILES[kind] if k % ALIGNED == 0 else _TILES[kind][:1]
    tile = next((tile for tile in tiles if tile.block_m >= rows), tiles[-1])
    m_tiles, n_tiles = -(-rows // tile.block_m), -(-n // tile.block_n)
    full = rows > tile.block_m and m_tiles * n_tiles >= FULL_CHIP
    in_sequence = full and order.split_k > 1 and in_sequence_fits(kind, group)
    return LinearLaunch(order, tile, m_tiles, n_tiles, in_sequence)


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Allocated once; launches on one stream share it, streams do not.

    partials: float32, partial sums of split-K. counters: int32, how many splits of a
    tile are done; zero between launches, each launch leaves them so. permuted: rows with their channels in the order
    of an act-order weight, or None.
    """

    partials: Tensor
    counters: Tensor
    permuted: Tensor | None

    @classmethod
    def for_layers(
        cls,
        layers: Iterable[tuple[int, int, LinearKind, int]],
        max_rows: int,
        device: torch.device,
        permuted: torch.dtype | None = None,
    ) -> LinearWorkspace:
        """Enough for any number of rows up to ``max_rows`` of every layer (n, k, kind, group); group only counts for
        int4. ``permuted``: the rows' type where some layer has an input order of its own."""
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

    def check(self, launch: LinearLaunch, device: torch.device) -> None:
        """ValueError unless there is enough for ``launch`` on ``device``."""
        if self.partials.device != device:
            raise ValueError(f"workspace: is on {self.partials.device}; must be on {device}")
        if self.partials.numel() < launch.partials or self.counters.numel() < launch.counters:
            raise ValueError(
                f"workspace: has {self.partials.numel()} partials and {self.counters.numel()} counters, "
                f"this layer needs {launch.partials} and {launch.counters}; make it for_layers() with this one"
            )


def check_result(
    out: Tensor,
    rows: int,
    n: int,
    device: torch.device,
    *,
    inputs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> None:
    """Check where a linear layer's result goes and what is added to it.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or ``out`` overwrites ``x``; names the argument.
    """
    check_rank("out", out, 2)
    check_tensor("out", out, (rows, n), ROW_TYPES, device)
    if out.numel() and out.data_ptr() == inputs.data_ptr():
        raise ValueError("out: is x; programs would read what others have overwritten, pass another tensor")
    if bias is not None:
        check_tensor("bias", bias, (n,), ROW_TYPES, device)
    if residual is not None:
        check_tensor("residual", residual, (rows, n), ROW_TYPES, device)


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
    amd: bool,
    *,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: bool = True,
) -> CompileCase:
    """``kernel`` as ``launch`` launches it; pointers: type by name of those that are its own; aligned: whether k is a
    multiple of 16."""
    signature = {name: f"*{kind}" for name, kind in pointers.items()}
    signature |= {"partial": "*fp32", "counter": "*i32", "rows": "i32", "n": "i32", "k": "i32"}
    splits = (
        f" {'sequence' if launch.in_sequence else 'split'} {launch.order.split_k}" if launch.order.split_k > 1 else ""
    )
    return CompileCase(
        name=f"{name} {launch.tile.block_m}x{launch.tile.block_n}{splits} {'amd' if amd else 'nvidia'}",
        kernel=kernel,
        signature=signature,
        constexprs={**launch.constants(), **constants},
        divisible=tuple(arg for arg in signature if arg != "rows" and (aligned or arg != "k")),
        options=launch.options(amd),
        targets=("gfx",) if amd else ("sm_",),
    )
