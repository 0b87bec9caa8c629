"""Scratch memory of the linear kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.gpu.linear_launch import LinearLaunch
from verify_kernels.gpu.linear_tiles import LinearKind, plan_launch, tiles_of


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Allocated once; launches on one stream share it, streams do not.

    partials: float32, what splits of a tile hand to the one that adds them up. counters: int32, how many splits of a
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
