"""Device memory of tree attention: a step's plan and the partial sums of one layer. Its addresses never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.gpu.attention_plan_work import HEADER_FIELDS, NEVER, WORK_FIELDS
from verify_kernels.gpu.attention_tiles import HEAD_DIMS, TILE, AttentionTile, attention_tile, chip_of, multiprocessors

WIDE_ROWS = 16  # packed rows per entry, in tiles of 128, from which tiles of 128 rows pay


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Room for steps of up to max_rows rows, max_entries entries and max_pages pages per entry, of one model.

    Written by `attention_plan`, for all layers of the step: header int32 [4]; work int32 [works, 16], see
    `verify_kernels.gpu.attention_plan_work`; leaf_of, diverge, top, has_child int32 [max_rows]: for each row the leaf
    whose path it belongs to; for each leaf the first depth whose slot is not its position, and the first depth of its
    own rows; path int32 [max_rows, max_branch]: for each leaf the rows on its path from itself upwards, as far as they
    lie off the entry's leading chain; path_works, last_tile int32 [max_entries]. Rows are counted within the entry.

    Written by `tree_attention`, for itself: partials float32 [slots, heads, head_dim], peaks float32 [slots, heads, 2].

    coarse: whether plans are coarse where there is room for fine ones; None: as pays. No result shows it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    chip: str
    processors: int
    max_rows: int
    max_entries: int
    max_pages: int
    max_branch: int
    header: Tensor
    work: Tensor
    leaf_of: Tensor
    has_child: Tensor
    diverge: Tensor
    top: Tensor
    path: Tensor
    path_works: Tensor
    last_tile: Tensor
    partials: Tensor
    peaks: Tensor
    coarse: bool | None = None

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
        """Allocate once, for the largest step. max_branch: nodes of a path that lie off the entry's leading chain.

        Raises:
            ValueError: a number is not positive, heads do not divide, or the head size is none that kernels know.
        """
        sizes = {"heads": heads, "kv_heads": kv_heads, "max_rows": max_rows, "max_entries": max_entries}
        for name, value in (sizes | {"max_pages": max_pages, "max_branch": max_branch}).items():
            if value < 1:
                raise ValueError(f"{name}: {value}; must be at least 1")
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: {head_dim}; must be one of {HEAD_DIMS}")
        if heads % kv_heads or heads // kv_heads > TILE:
            raise ValueError(f"heads: {heads}; must be a multiple of kv_heads, {kv_heads}, and at most {TILE} times it")
        chip = chip_of(device)
        tile = attention_tile(chip, head_dim, kv_dtype)
        works = _most_works(tile, heads // kv_heads, max_rows, max_entries, max_pages)
        slots = max_rows * most_units(tile, max_rows, max_pages)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return AttentionWorkspace(
            heads, kv_heads, head_dim, kv_dtype, chip, multiprocessors(device),
            max_rows, max_entries, max_pages, max_branch,
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
        """What the partial sums of such a workspace take, next to which the plan is nothing."""
        tile = attention_tile(chip_of(device), head_dim, kv_dtype)
        return max_rows * most_units(tile, max_rows, max_pages) * heads * (head_dim + 2) * torch.float32.itemsize

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def slots(self) -> int:
        """Partial sums per head that there is room for."""
        return self.partials.shape[0]

    def tile(self, rows: int, entries: int, *, windowed: bool = False) -> AttentionTile:
        """The tile for a step of that many rows and entries, padding included. Plan and layers ask alike."""
        wide = (rows - WIDE_ROWS * entries) * self.group >= WIDE_ROWS * 64
        return attention_tile(self.chip, self.head_dim, self.kv_dtype, windowed=windowed, wide=wide)

    def coarse_from(self, rows: int, entries: int) -> int:
        """From how many items of whole blocks on a plan is coarse: where they keep the chip's memory busy.

        Rows that fill a sixteenth of a tile leave small partial sums, so finer cuts cost them next to nothing.
        """
        if self.coarse is not None:
            return 0 if self.coarse else int(NEVER)
        few = rows * self.group <= 16 * entries
        return self.processors * 3 if few else self.processors * 3 // 4


def most_units(tile: AttentionTile, max_rows: int, max_pages: int) -> int:
    """Partial sums that a row of a coarse plan has at most."""
    block = tile.seg_tiles * tile.fold_segs
    filled = max_rows // TILE + 1  # tiles that rows of the step itself can fill
    return 2 + max_pages // block + -(-(block - 1 + filled) // tile.seg_tiles)


def _most_works(tile: AttentionTile, group: int, max_rows: int, max_entries: int, max_pages: int) -> int:
    block = tile.seg_tiles * tile.fold_segs
    row_tiles = min(max_rows, max_rows // (tile.block_m // group) + max_entries)
    filled = max_rows // TILE + 1
    per_tile = max_pages // block + tile.fold_segs
    return row_tiles * per_tile + max_rows * (2 + -(-filled // tile.seg_tiles))
