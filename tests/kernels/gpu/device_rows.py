"""A batch's rows as the tensors that kernels take, with padding of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.kernels.batches import random_parents
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu.kernel_launch import StepRows


@dataclass(frozen=True, slots=True)
class DeviceRows(StepRows):
    """Rows of a batch on a device. root_row: int32 [entries], -1 for no tree; live: rows that are no padding."""

    tokens: Tensor
    root_row: Tensor
    live: int

    @staticmethod
    def build(
        entries: Sequence[BatchEntry],
        roots: Sequence[int],
        device: torch.device,
        pad_rows: int = 0,
        pad_entries: int = 0,
    ) -> DeviceRows:
        """Padded rows name no entry or one they do not lie in; padded entries have no rows; both hold nonsense."""
        batch = ForwardBatch.build(entries)
        stale = np.resize(np.array([-1, 0, len(entries), len(entries) + pad_entries + 3], np.int32), pad_rows)

        def tensor(array: np.ndarray, pad: int, value: int) -> Tensor:
            widths = [(0, pad)] + [(0, 0)] * (array.ndim - 1)
            return torch.from_numpy(np.pad(array, widths, constant_values=value)).to(device)

        return DeviceRows(
            tokens=tensor(batch.tokens, pad_rows, 3),
            entry_of=torch.cat([tensor(batch.entry_of, 0, 0), torch.from_numpy(stale).to(device)]),
            parent=tensor(batch.parent, pad_rows, 1 << 20),
            depth=tensor(batch.depth, pad_rows, 1 << 29),
            entry_start=tensor(batch.entry_start, pad_entries, batch.rows),
            entry_ctx=tensor(batch.entry_ctx, pad_entries, 1 << 29),
            page_table=tensor(batch.page_table, pad_entries, -7),
            root_row=tensor(np.array(roots, np.int32), pad_entries, 0),
            live=batch.rows,
        )


def random_entries(
    rng: np.random.Generator, shapes: Sequence[tuple[int, int, int]], n_pages: int, vocab: int = 100
) -> tuple[list[BatchEntry], list[int]]:
    """One entry per (ctx, chain, nodes) on shuffled pages, and their roots; nodes -1: amid a prompt, chain only."""
    free = [int(page) for page in rng.permutation(n_pages)]
    entries, roots = [], []
    for ctx, chain, nodes in shapes:
        parents = list(range(-1, chain - 1)) if nodes < 0 else random_parents(rng, chain, nodes)
        pages = [free.pop() for _ in range(-(-(ctx + len(parents)) // PAGE_SIZE))]
        entries.append(BatchEntry(rng.integers(0, vocab, len(parents)).tolist(), parents, ctx, pages))
        roots.append(-1 if nodes < 0 else chain)
    return entries, roots


def pool_slot(entry: BatchEntry, row: int) -> int:
    """Position of a row's KV in the pool: page * 64 + lane."""
    slot = entry.ctx + row
    return entry.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE


def choices(rng: np.random.Generator, entry: BatchEntry, root: int, vocab: int) -> list[int]:
    """Sampled tokens that lead to deep walks: most rows choose the token of one of their children."""
    sampled = rng.integers(0, vocab, len(entry.tokens)).tolist()
    for row in range(max(root, 0) + 1, len(entry.tokens)):
        if rng.random() < 0.6:
            sampled[entry.parents[row]] = entry.tokens[row]
    return sampled


def on(device: torch.device, values: list[int]) -> Tensor:
    """``values`` as int32."""
    return torch.tensor(values, dtype=torch.int32, device=device)
