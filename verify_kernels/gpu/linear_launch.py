"""One launch of a linear kernel."""

from __future__ import annotations

from dataclasses import dataclass

from verify_kernels.gpu.linear_order import LinearOrder
from verify_kernels.gpu.linear_tile import LinearTile

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
