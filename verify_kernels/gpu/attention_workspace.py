"""Tree attention's tiles by chip, a work item's fields, and the device memory of a step's plan.

A row's keys are cut at absolute positions, whatever the batch: tiles of 64 (a page), segments of `SEGMENT_TILES` tiles,
blocks of FOLD_SEGS segments. A row at position p has tiles 0 .. p // 64; the last one, which ends at the row itself,
stands alone, the others form segments. Within a segment tiles are added to one running softmax; segments are folded
into their block in order, blocks are summed in order, the last tile comes last. All of it follows from p alone, so a
tree node, a prefill row and a plainly decoded row of one text get the same bits.

`verify_kernels.gpu.attention_plan` shows which work item reads which keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.kernel_launch import FP8, SMALL, chip_of

HEAD_DIMS = (64, 80, 96, 128, 256)  # head sizes that are compiled
TILE = PAGE_SIZE  # keys of a tile
SEGMENT_TILES = tl.constexpr(4)  # tiles of a segment; changes results bitwise


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """How the kernels run.

    A result's bits depend on ``lanes``, ``fold_segs`` and the kind of matrix instruction, so these depend on chip, head
    size, KV type and window alone. The other fields may depend on anything.
    """

    block_m: int  # packed rows (rows x query heads of a KV head) of a tile
    lanes: int  # keys per matrix product; divides 64
    fold_segs: int  # segments in a block
    warps: int
    stages: int
    resident: int  # programs per multiprocessor

    @property
    def block_tiles(self) -> int:
        """Tiles of keys in a block."""
        return int(SEGMENT_TILES) * self.fold_segs


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 2 for the CPU, so that interpreted programs take several items each."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def attention_tile(
    chip: str, head_dim: int, kv_dtype: torch.dtype, *, windowed: bool = False, wide: bool = False
) -> AttentionTile:
    """The tile for a head size and KV type on one of `CHIPS`; ``wide``: many rows per entry, as in prefill.

    A segment is 256 keys: 32 segments keep an H200 busy at batch 1 with 8k of context and 8 KV heads, and each costs a
    row a partial sum of head_dim + 2 floats. A block is 4 segments, folded in registers if there is enough other work,
    which leaves a quarter of the sums. At head_dim 256 registers do not hold both sums, so a block is one segment.
    """
    large = head_dim > 128
    wide = wide and chip == "sm_90" and not large
    fp8 = kv_dtype == FP8
    if chip == "gfx942":
        lanes, warps = 16 if windowed else 32, 8 if large and windowed else 4
        return AttentionTile(64, lanes, 1, warps, 1, 1 if large else 2)
    small = chip in SMALL
    if 64 < head_dim <= 128 and (small or (windowed and chip == "sm_80")):
        return AttentionTile(64, 32 if small and fp8 else 64, 4, 8, 3, 1)
    if chip == "sm_100":
        return AttentionTile(64, 32 if large else 64, 1 if large else 4, 8, 3, 1)
    if large:
        return AttentionTile(64, 32, 1, 8, 2 if small else 3, 1)
    lanes = 32 if windowed and fp8 else 64
    stages = 4 if fp8 or head_dim == 64 else 3
    if chip == "sm_80" and head_dim > 64 and not fp8:
        stages = 2  # of three, two programs do not fit in an A100's 164 KiB
    return AttentionTile(
        128 if wide else 64, lanes, 4, 8 if wide else 4, stages, 1 if wide or small else 2
    )  # fmt: skip


WORK_FIELDS = tl.constexpr(16)
ENTRY = tl.constexpr(0)
START = tl.constexpr(1)  # first row of the entry
CONTEXT = tl.constexpr(2)  # its slots that were filled before this step
NODE_FIRST = tl.constexpr(3)  # rows of the tile: nodes [first, stop) of the path, that is depths, or rows of the entry
NODE_STOP = tl.constexpr(4)
TILE_FIRST = tl.constexpr(5)  # tiles [first, stop) are read as pages
TILE_STOP = tl.constexpr(6)
GATHER_STOP = tl.constexpr(7)  # tiles [stop, gather stop) are gathered; 0: none
LEAF = tl.constexpr(8)  # row of the entry whose path this is
LEAF_DEPTH = tl.constexpr(9)
DIVERGE = tl.constexpr(10)  # first depth of the path whose slot is not its position
SPLIT = tl.constexpr(11)  # which of its rows' partial results this is

HEADER_FIELDS = tl.constexpr(4)  # work items, KV splits of a row, coarse or not; one to spare
NEVER = tl.constexpr(1 << 30)


WIDE_ROWS = 16  # packed rows per entry, in tiles of 128, from which tiles of 128 rows pay


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Memory for the plan and partial sums of a model's steps.

    `attention_plan` writes the int32 arrays, for all layers of a step; rows are counted within their entry.
    `tree_attention` writes the float32 arrays.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    chip: str  # of `CHIPS`
    processors: int  # multiprocessors
    max_pages: int  # per entry
    max_branch: int  # nodes of a path off the entry's leading chain
    header: Tensor  # [HEADER_FIELDS]
    work: Tensor  # [works, WORK_FIELDS], work items
    leaf_of: Tensor  # [max_rows] leaf whose path the row belongs to
    has_child: Tensor  # [max_rows]
    diverge: Tensor  # [max_rows] for leaves: first depth of the path whose slot is not its position
    top: Tensor  # [max_rows] for leaves: first depth of the rows that belong to the path
    path: Tensor  # [max_rows, max_branch] for leaves: rows of the path from the leaf up to the leading chain
    path_works: Tensor  # [max_entries] work items of paths
    last_tile: Tensor  # [max_entries] the largest last tile of keys
    partials: Tensor  # float32 [slots, heads, head_dim], partial sums
    peaks: Tensor  # float32 [slots, heads, 2], their peaks and totals
    coarse: bool | None = None  # whether plans are coarse if there is room for fine ones; None: the faster way

    @staticmethod
    def allocate(
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        max_rows: int,
        max_entries: int,
        max_pages: int,
        max_branch: int = 64,
        device: torch.device,
    ) -> AttentionWorkspace:
        """A workspace for steps of up to these sizes, all positive. head_dim: of `HEAD_DIMS`; heads: a multiple of
        kv_heads, at most `TILE` times it."""
        chip = chip_of(device)
        tile = attention_tile(chip, head_dim, kv_dtype)
        works = _most_works(tile, heads // kv_heads, max_rows, max_entries, max_pages)
        slots = max_rows * most_splits(tile, max_rows, max_pages)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return AttentionWorkspace(
            heads, kv_heads, head_dim, kv_dtype, chip, multiprocessors(device), max_pages, max_branch,
            ints(int(HEADER_FIELDS)), ints(works, int(WORK_FIELDS)),
            ints(max_rows), ints(max_rows), ints(max_rows), ints(max_rows), ints(max_rows, max_branch),
            ints(max_entries), ints(max_entries),
            torch.empty(slots, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(slots, heads, 2, dtype=torch.float32, device=device),
        )  # fmt: skip

    @staticmethod
    def partial_bytes(
        *, heads: int, head_dim: int, kv_dtype: torch.dtype, max_rows: int, max_pages: int, device: torch.device
    ) -> int:
        """Bytes of a workspace's partial sums; the rest of it is negligible."""
        tile = attention_tile(chip_of(device), head_dim, kv_dtype)
        return max_rows * most_splits(tile, max_rows, max_pages) * heads * (head_dim + 2) * torch.float32.itemsize

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def slots(self) -> int:
        """Partial sums per head that the workspace holds."""
        return self.partials.shape[0]

    def tile(self, rows: int, entries: int, *, windowed: bool = False) -> AttentionTile:
        """The tile for a step of ``rows`` and ``entries``, padding included; the same for its plan and its layers."""
        wide = (rows - WIDE_ROWS * entries) * self.group >= WIDE_ROWS * 64
        return attention_tile(self.chip, self.head_dim, self.kv_dtype, windowed=windowed, wide=wide)

    def coarse_from(self, rows: int, entries: int) -> int:
        """The number of items of whole blocks from which a plan is coarse: enough to keep the chip's memory busy.

        Rows that fill a sixteenth of a tile have small partial sums, so finer plans cost them little.
        """
        if self.coarse is not None:
            return 0 if self.coarse else int(NEVER)
        few = rows * self.group <= 16 * entries
        return self.processors * 3 if few else self.processors * 3 // 4


def most_splits(tile: AttentionTile, max_rows: int, max_pages: int) -> int:
    """The most partial sums of a row in a coarse plan."""
    filled = max_rows // TILE + 1  # tiles that rows of the step itself can fill
    return 2 + max_pages // tile.block_tiles + -(-(tile.block_tiles - 1 + filled) // int(SEGMENT_TILES))


def _most_works(tile: AttentionTile, group: int, max_rows: int, max_entries: int, max_pages: int) -> int:
    row_tiles = min(max_rows, max_rows // (tile.block_m // group) + max_entries)
    filled = max_rows // TILE + 1
    per_tile = max_pages // tile.block_tiles + tile.fold_segs
    return row_tiles * per_tile + max_rows * (2 + -(-filled // int(SEGMENT_TILES)))
