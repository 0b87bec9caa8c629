"""The plan of tree attention in plain Python: the same leaf paths and the same work items."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from verify_kernels.gpu.attention_plan_work import NEVER, WORK_FIELDS
from verify_kernels.gpu.attention_tiles import TILE, AttentionTile
from verify_kernels.gpu.attention_workspace import AttentionWorkspace


def attention_plan(
    entry_start: Tensor, entry_ctx: Tensor, parent: Tensor, depth: Tensor, workspace: AttentionWorkspace
) -> None:
    """Fill the workspace's plan; see `verify_kernels.gpu.attention_plan`."""
    rows, entries = depth.shape[0], entry_ctx.shape[0]
    tile = workspace.tile(rows, entries)
    starts = [min(max(start, 0), rows) for start in entry_start.tolist()]
    spans = list(pairwise(starts))
    contexts = [min(max(ctx, 0), workspace.max_pages * TILE - 1) for ctx in entry_ctx.tolist()]
    for start, stop in spans:
        if start < stop:
            _fill_paths(workspace, start, parent[start:stop].tolist(), depth[start:stop].tolist())
    plans = [
        {coarse: _Entry(index, start, stop, ctx, workspace, tile, coarse, depth) for coarse in (False, True)}
        for index, ((start, stop), ctx) in enumerate(zip(spans, contexts, strict=True))
        if start < stop
    ]
    blocks = sum(plan[True].blocks * plan[True].row_tiles for plan in plans)
    coarse = tile.fold_segs > 1 and (
        blocks * workspace.kv_heads >= workspace.coarse_from(rows, entries)
        or max(starts) * max((plan[False].units for plan in plans), default=0) > workspace.slots
        or sum(1 for plan in plans for _ in plan[False].works()) > workspace.work.shape[0]
    )
    works = [work for plan in plans for work in plan[coarse].works()]
    units = max((plan[coarse].units for plan in plans), default=2)
    workspace.header[:3] = torch.tensor([len(works), units, coarse], dtype=torch.int32)
    if works:
        padded = [[*work, *([0] * (int(WORK_FIELDS) - len(work)))] for work in works]
        workspace.work[: len(works)] = torch.tensor(padded, dtype=torch.int32, device=workspace.work.device)


def _fill_paths(workspace: AttentionWorkspace, start: int, parents: list[int], depths: list[int]) -> None:
    """Leaves and paths of one entry; a row belongs to the first leaf below it."""
    n = len(parents)
    chain = next((row for row in range(n) if parents[row] != row - 1), n)
    leaf_of = [n] * n
    for row in reversed(range(n)):
        leaf_of[row] = min(row if leaf_of[row] == n else n, leaf_of[row])
        if row >= chain:
            leaf_of[parents[row]] = min(leaf_of[parents[row]], leaf_of[row])
    leaf_of[:chain] = [leaf_of[chain - 1]] * chain
    for leaf in set(range(n)) - set(parents):
        if leaf < chain - 1:
            continue
        path, row = [], leaf
        while row >= chain:
            path.append(row)
            row = parents[row]
        held = torch.tensor(path[: workspace.max_branch], dtype=torch.int32)
        workspace.path[start + leaf, : len(held)] = held
        workspace.diverge[start + leaf] = depths[path[-1]] if path else int(NEVER)
        workspace.top[start + leaf] = min(depths[row] for row in range(n) if leaf_of[row] == leaf)
    workspace.leaf_of[start : start + n] = torch.tensor(leaf_of, dtype=torch.int32)


class _Entry:
    """One entry's work items in a fine or a coarse plan."""

    def __init__(
        self,
        index: int,
        start: int,
        stop: int,
        ctx: int,
        workspace: AttentionWorkspace,
        tile: AttentionTile,
        coarse: bool,
        depth: Tensor,
    ) -> None:
        self.head = (index, start, ctx)
        self.n, self.ctx = stop - start, ctx
        self.segment, self.fold = tile.seg_tiles, tile.fold_segs
        self.nodes = tile.block_m // workspace.group
        self.row_tiles = -(-self.n // self.nodes)
        self.tiles = ctx // TILE
        self.blocks = self.tiles // (self.segment * self.fold) if coarse else 0
        self.depth = depth[start:stop].tolist()
        self.leaf_of = workspace.leaf_of[start:stop].tolist()
        self.diverge = workspace.diverge[start:stop].tolist()
        self.top = workspace.top[start:stop].tolist()
        last = max((ctx + d) // TILE for d in self.depth)
        self.units = 2 + -(-last // self.segment) - self.blocks * (self.fold - 1)

    def works(self) -> Iterator[tuple[int, ...]]:
        """Records, in the order of the list."""
        stretches = [(b * self.fold, (b + 1) * self.fold) for b in range(self.blocks)]
        stretches += [(s, s + 1) for s in range(self.blocks * self.fold, -(-self.tiles // self.segment))]
        for row in range(self.n):
            yield from self._path_works(row, len(stretches))
        for unit, (first, stop) in enumerate(stretches, start=1):
            for node in range(0, self.n, self.nodes):
                tiles = (first * self.segment, min(stop * self.segment, self.tiles), 0)
                yield (*self.head, node, min(node + self.nodes, self.n), *tiles, 0, 0, int(NEVER), unit)

    def _path_works(self, row: int, stretches: int) -> Iterator[tuple[int, ...]]:
        node, leaf = self.depth[row], self.leaf_of[row]
        last = (self.ctx + node) // TILE
        if (node - max(self.top[leaf], last * TILE - self.ctx)) % self.nodes:
            return
        stop = min(node + self.nodes, self.depth[leaf] + 1, (last + 1) * TILE - self.ctx)
        path = (leaf, self.depth[leaf], self.diverge[leaf])
        yield (*self.head, node, stop, last, last, last + 1, *path, 0)
        if last > self.tiles:
            for segment in range(self.tiles // self.segment, -(-last // self.segment)):
                first, end = segment * self.segment, min((segment + 1) * self.segment, last)
                pages = min(max((self.ctx + self.diverge[leaf]) // TILE, first), end)
                unit = 1 + stretches + segment - self.tiles // self.segment
                yield (*self.head, node, stop, first, pages, end if end > pages else 0, *path, unit)
