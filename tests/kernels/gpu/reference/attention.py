"""KV writes, the attention plan and tree attention in plain torch and Python, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.attention_workspace import (
    NEVER,
    SEGMENT_TILES,
    TILE,
    WORK_FIELDS,
    AttentionTile,
    AttentionWorkspace,
)
from verify_kernels.gpu.kernel_launch import FP8, FP8_LARGEST, StepRows
from verify_kernels.reference.backend import rms_norm, rotate_half


def write_kv(
    qkv: Tensor,
    q_out: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cos: Tensor,
    sin: Tensor,
    step: StepRows,
    *,
    eps: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> None:
    """q_out = rotated q; K and V to their slots; see `verify_kernels.gpu.kv_ops`."""
    rows, heads, head_dim = q_out.shape
    kv_heads = k_pool.shape[1]
    row, entry, ctx = _live_rows(step.entry_of, step.entry_start, step.entry_ctx)
    page_table = step.page_table
    packed = qkv.view(rows, heads + 2 * kv_heads, head_dim)[row].float()
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm.float(), eps), rms_norm(k, k_norm.float(), eps)
    position = (ctx + step.depth[row]).clamp(0, cos.shape[0] - 1).long()
    angles = cos[position][:, None], sin[position][:, None]
    q_out[row] = rotate_half(q, *angles).to(q_out.dtype)
    k = rotate_half(k, *angles)

    slot = ctx + row - step.entry_start[entry]
    listed = (slot >= 0) & (slot < page_table.shape[1] * PAGE_SIZE)
    page = page_table[entry, (slot // PAGE_SIZE).clamp(0, page_table.shape[1] - 1)]
    writes = listed & (page >= 0) & (page < k_pool.shape[0])
    page, lane = page[writes].long(), (slot % PAGE_SIZE)[writes]
    k_pool[page, :, lane] = _stored(k[writes], k_pool.dtype)
    v_pool[page, :, lane] = _stored(v[writes], v_pool.dtype)


def move_kv(k_pool: Tensor, v_pool: Tensor, source: Tensor, target: Tensor, n_moves: Tensor) -> None:
    """Copy cache rows of all layers, one after the other; see `verify_kernels.gpu.kv_ops`."""
    slots = k_pool.shape[1] * PAGE_SIZE
    for entry, count in enumerate(n_moves.tolist()):
        for a, b in zip(source[entry].tolist()[: max(count, 0)], target[entry].tolist(), strict=False):
            if 0 <= a < slots and 0 <= b < slots:
                for pool in (k_pool, v_pool):
                    pool[:, b // PAGE_SIZE, :, b % PAGE_SIZE] = pool[:, a // PAGE_SIZE, :, a % PAGE_SIZE].clone()


def _live_rows(entry_of: Tensor, entry_start: Tensor, entry_ctx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that lie within their entry, as int64 [n], with their entries and the contexts of these."""
    row = torch.arange(entry_of.shape[0], device=entry_of.device)
    known = (entry_of >= 0) & (entry_of < entry_ctx.shape[0])
    entry = entry_of.where(known, 0).long()
    live = known & (row >= entry_start[entry]) & (row < entry_start[entry + 1])
    return row[live], entry[live], entry_ctx[entry[live]].long()


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, kv_heads, head_dim] as the pool holds it."""
    if dtype == FP8:
        x = x.clamp(-FP8_LARGEST, FP8_LARGEST)
    return x.to(dtype)


def attention_plan(step: StepRows, workspace: AttentionWorkspace) -> None:
    """Fill the workspace's plan; see `verify_kernels.gpu.attention_plan`."""
    parent, depth = step.parent, step.depth
    rows, entries = depth.shape[0], step.entry_ctx.shape[0]
    tile = workspace.tile(rows, entries)
    starts = [min(max(start, 0), rows) for start in step.entry_start.tolist()]
    spans = list(pairwise(starts))
    contexts = [min(max(ctx, 0), workspace.max_pages * TILE - 1) for ctx in step.entry_ctx.tolist()]
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
        or max(starts) * max((plan[False].splits for plan in plans), default=0) > workspace.slots
        or sum(1 for plan in plans for _ in plan[False].works()) > workspace.work.shape[0]
    )
    works = [work for plan in plans for work in plan[coarse].works()]
    splits = max((plan[coarse].splits for plan in plans), default=2)
    workspace.header[:3] = torch.tensor([len(works), splits, coarse], dtype=torch.int32)
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
        self.segment, self.fold = int(SEGMENT_TILES), tile.fold_segs
        self.nodes = tile.block_m // workspace.group
        self.row_tiles = -(-self.n // self.nodes)
        self.tiles = ctx // TILE
        self.blocks = self.tiles // (self.segment * self.fold) if coarse else 0
        self.depth = depth[start:stop].tolist()
        self.leaf_of = workspace.leaf_of[start:stop].tolist()
        self.diverge = workspace.diverge[start:stop].tolist()
        self.top = workspace.top[start:stop].tolist()
        last = max((ctx + d) // TILE for d in self.depth)
        self.splits = 2 + -(-last // self.segment) - self.blocks * (self.fold - 1)

    def works(self) -> Iterator[tuple[int, ...]]:
        """Records, in the order of the list."""
        chunks = [(b * self.fold, (b + 1) * self.fold) for b in range(self.blocks)]
        chunks += [(s, s + 1) for s in range(self.blocks * self.fold, -(-self.tiles // self.segment))]
        for row in range(self.n):
            yield from self._path_works(row, len(chunks))
        for split, (first, stop) in enumerate(chunks, start=1):
            for node in range(0, self.n, self.nodes):
                tiles = (first * self.segment, min(stop * self.segment, self.tiles), 0)
                yield (*self.head, node, min(node + self.nodes, self.n), *tiles, 0, 0, int(NEVER), split)

    def _path_works(self, row: int, chunks: int) -> Iterator[tuple[int, ...]]:
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
                split = 1 + chunks + segment - self.tiles // self.segment
                yield (*self.head, node, stop, first, pages, end if end > pages else 0, *path, split)


def tree_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    step: StepRows,
    workspace: AttentionWorkspace,
    *,
    scale: float,
    window: int = 0,
) -> None:
    """out = attention of every row to the keys of its own path; see `verify_kernels.gpu.tree_attention`."""
    group, starts = workspace.group, step.entry_start.tolist()
    for row, entry in enumerate(step.entry_of.tolist()):
        if not 0 <= entry < step.entry_ctx.shape[0] or not starts[entry] <= row < starts[entry + 1]:
            continue
        slots = _slots(workspace, row, starts[entry], int(step.entry_ctx[entry]), step.depth)
        if window:
            slots = slots[-window:]
        page, lane = step.page_table[entry][slots // TILE].long(), slots % TILE
        k, v = k_pool[page, :, lane].float(), v_pool[page, :, lane].float()  # [keys, kv_heads, head_dim]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,jhd->hj", q[row].float(), k) * scale).softmax(-1)
        out[row] = torch.einsum("hj,jhd->hd", weights, v).to(out.dtype)


def _slots(workspace: AttentionWorkspace, row: int, start: int, ctx: int, depth: Tensor) -> Tensor:
    """Slots of a row's keys, by position."""
    own, leaf = int(depth[row]), start + int(workspace.leaf_of[row])
    node = torch.arange(own + 1, device=depth.device)
    back = (int(depth[leaf]) - node).clamp(0, workspace.max_branch - 1)
    node = torch.where(node < workspace.diverge[leaf], node, workspace.path[leaf][back])
    return torch.cat((torch.arange(ctx, device=depth.device), ctx + node)).long()
