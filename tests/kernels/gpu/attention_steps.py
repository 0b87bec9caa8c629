"""Steps of random trees and chains on a paged cache, for tests of tree attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace
from verify_kernels.gpu.kernel_launch import FP8, StepRows
from verify_kernels.gpu.tree_attention import tree_attention

Shape = tuple[int, int, int]  # ctx, chain rows below the root, draft nodes


@dataclass(frozen=True)
class Geometry:
    """A layer's attention, as far as the kernels care."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    window: int = 0
    fp8: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.fp8 else self.dtype

    def workspace(self, device: torch.device, **sizes: int) -> AttentionWorkspace:
        room = {"max_rows": 192, "max_entries": 8, "max_pages": 48, "max_branch": 128} | sizes
        return AttentionWorkspace.allocate(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, kv_dtype=self.kv_dtype, device=device,
            **room,
        )  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """A geometry's pools and the queries of a step's rows; queries [rows, heads, head_dim]."""

    geometry: Geometry
    k_pool: Tensor
    v_pool: Tensor
    q: Tensor

    @staticmethod
    def random(geometry: Geometry, rows: int, n_pages: int, seed: int, device: torch.device) -> Layer:
        g = torch.Generator().manual_seed(seed)
        shape = (n_pages, geometry.kv_heads, PAGE_SIZE, geometry.head_dim)
        pools = [torch.randn(shape, generator=g).to(geometry.kv_dtype) for _ in range(2)]
        q = torch.randn(rows, geometry.heads, geometry.head_dim, generator=g).to(geometry.dtype)
        return Layer(geometry, pools[0].to(device), pools[1].to(device), q.to(device))

    @property
    def scale(self) -> float:
        return self.geometry.head_dim**-0.5


@dataclass(frozen=True)
class Step(StepRows):
    """Device arrays of a batch."""

    @staticmethod
    def of(entries: Sequence[BatchEntry], device: torch.device) -> Step:
        batch = ForwardBatch.build(entries)
        arrays = (
            batch.entry_of, batch.entry_start, batch.entry_ctx, batch.parent, batch.depth, batch.page_table,
        )  # fmt: skip
        return Step(*(torch.from_numpy(array.copy()).to(device) for array in arrays))

    @property
    def rows(self) -> int:
        return self.depth.shape[0]

    def padded(self, rows: int, entries: int, pages: int, garbage: int) -> Step:
        """The same step in a larger tier, padded with ``garbage``."""

        def grown(tensor: Tensor, *shape: int) -> Tensor:
            full = torch.full(shape, garbage, dtype=tensor.dtype, device=tensor.device)
            full[tuple(slice(n) for n in tensor.shape)] = tensor
            return full

        n_entries, end = self.entry_ctx.shape[0], int(self.entry_start[-1])
        start = grown(self.entry_start, entries + 1)
        start[n_entries + 1 :] = end
        return Step(
            grown(self.entry_of, rows), start, grown(self.entry_ctx, entries), grown(self.parent, rows),
            grown(self.depth, rows), grown(self.page_table, entries, pages),
        )  # fmt: skip


def random_parents(rng: np.random.Generator, chain: int, nodes: int, deep: float) -> list[int]:
    """A chain of ``chain`` rows, a root, then draft nodes: ``deep`` of them below the newest node."""
    parents = [i - 1 for i in range(chain + 1)]
    for _ in range(nodes):
        newest = len(parents) - 1
        parents.append(newest if rng.random() < deep else int(rng.integers(chain, len(parents))))
    return parents


def random_entries(
    rng: np.random.Generator, shapes: Sequence[Shape], n_pages: int, deep: float = 0.5
) -> list[BatchEntry]:
    """One entry per shape, on shuffled pages."""
    free = list(rng.permutation(n_pages))
    entries = []
    for ctx, chain, nodes in shapes:
        parents = random_parents(rng, chain, nodes, deep)
        need = -(-(ctx + len(parents)) // PAGE_SIZE)
        entries.append(BatchEntry([0] * len(parents), parents, ctx, [int(free.pop()) for _ in range(need)]))
    return entries


def attend(layer: Layer, step: Step, workspace: AttentionWorkspace | None = None) -> Tensor:
    """Plan and attention by the kernels; rows of padding come out as nan."""
    ws = workspace or layer.geometry.workspace(step.depth.device)
    attention_plan(step, ws)
    return attend_planned(layer, step, ws)


def attend_planned(layer: Layer, step: Step, workspace: AttentionWorkspace) -> Tensor:
    """Attention with an existing plan; partial sums of earlier launches must not show."""
    workspace.partials.fill_(torch.nan)
    workspace.peaks.fill_(torch.nan)
    out = torch.full_like(layer.q, torch.nan)
    tree_attention(
        layer.q, layer.k_pool, layer.v_pool, out, step, workspace, scale=layer.scale,
        window=layer.geometry.window,
    )  # fmt: skip
    return out


def path_of(parents: Sequence[int], row: int) -> list[int]:
    """Rows from the entry's first to ``row``."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def dense_oracle(layer: Layer, entries: Sequence[BatchEntry]) -> Tensor:
    """Every row's attention in float64 over its own path, from parents and page lists alone."""
    geometry, group = layer.geometry, layer.geometry.heads // layer.geometry.kv_heads
    pools = [pool.cpu().float().double() for pool in (layer.k_pool, layer.v_pool)]
    results, q = [], layer.q.cpu().double()
    for entry in entries:
        for row in range(len(entry.parents)):
            slots = [*range(entry.ctx), *(entry.ctx + node for node in path_of(entry.parents, row))]
            slots = slots[-geometry.window :] if geometry.window else slots
            keys, values = (
                torch.stack([pool[entry.pages[s // PAGE_SIZE], :, s % PAGE_SIZE] for s in slots]) for pool in pools
            )
            heads = []
            for head in range(geometry.heads):
                scores = keys[:, head // group] @ q[len(results), head] * layer.scale
                heads.append(scores.softmax(0) @ values[:, head // group])
            results.append(torch.stack(heads))
    return torch.stack(results)


def plain_decode(layer: Layer, entry: BatchEntry, first_row: int, row: int) -> Tensor:
    """``row`` of an entry decoded alone, its path committed in order: [heads, head_dim]."""
    path = path_of(entry.parents, row)
    committed = with_committed(layer, entry, path)
    lone = BatchEntry([0], [-1], entry.ctx + len(path) - 1, entry.pages)
    query = layer.q[first_row + row : first_row + row + 1].clone()
    return attend(replace(committed, q=query), Step.of([lone], layer.q.device))[0]


def with_committed(layer: Layer, entry: BatchEntry, path: Sequence[int]) -> Layer:
    """The cache after the rows of ``path`` moved to the slots of their positions."""
    k_pool, v_pool = layer.k_pool.clone(), layer.v_pool.clone()
    for old, new in ((layer.k_pool, k_pool), (layer.v_pool, v_pool)):
        for depth, node in enumerate(path):
            a, b = entry.ctx + node, entry.ctx + depth
            new[entry.pages[b // PAGE_SIZE], :, b % PAGE_SIZE] = old[
                entry.pages[a // PAGE_SIZE], :, a % PAGE_SIZE
            ].clone()
    return replace(layer, k_pool=k_pool, v_pool=v_pool)
