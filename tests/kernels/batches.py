"""Random batches of chains and trees, for kernel tests."""

from __future__ import annotations

import numpy as np

from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch


def random_parents(rng: np.random.Generator, chain: int, nodes: int) -> list[int]:
    """A chain of ``chain`` rows, then a root and ``nodes`` draft nodes in random topological order."""
    parents = [i - 1 for i in range(chain + 1)]
    for _ in range(nodes):
        parents.append(int(rng.integers(chain, len(parents))))
    return parents


def random_batch(
    rng: np.random.Generator, shapes: list[tuple[int, int, int]], n_pages: int, vocab: int
) -> tuple[ForwardBatch, list[BatchEntry]]:
    """One entry per (ctx, chain, nodes), on shuffled pages."""
    free = list(rng.permutation(n_pages))
    entries = []
    for ctx, chain, nodes in shapes:
        parents = random_parents(rng, chain, nodes)
        need = -(-(ctx + len(parents)) // PAGE_SIZE)
        pages = [int(free.pop()) for _ in range(need)]
        entries.append(BatchEntry(rng.integers(0, vocab, len(parents)).tolist(), parents, ctx, pages))
    return ForwardBatch.build(entries), entries
