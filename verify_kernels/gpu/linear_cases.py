"""What of the linear kernels there is to compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verify_kernels.gpu.compile_case import CompileCase
from verify_kernels.gpu.linear_launch import LinearLaunch
from verify_kernels.gpu.linear_order import LinearOrder
from verify_kernels.gpu.linear_tiles import SPLITS, LinearKind, block_k_of, in_sequence_fits, tiles_of


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
