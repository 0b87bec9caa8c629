"""Acceptance down each tree in plain Python over torch tensors."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.accept import MAX_NODES, AcceptResult
from verify_kernels.gpu.kernel_launch import StepRows


def accept(
    step: StepRows,
    root_row: Tensor,
    tokens: Tensor,
    sampled: Tensor,
    sample_start: Tensor,
    result: AcceptResult,
    *,
    n_pages: int,
) -> None:
    """Walk down each entry's tree; see `verify_kernels.gpu.accept`."""
    limit, parent, page_table = result.rows.shape[1], step.parent, step.page_table
    contexts = step.entry_ctx.tolist()
    for name in ("counts", "n_moves"):
        getattr(result, name).zero_()
    for name in ("rows", "emitted", "move_source", "move_target"):
        getattr(result, name).fill_(-1)
    for entry, ctx in enumerate(contexts):
        first, last = step.entry_start[entry : entry + 2].tolist()
        root, size = int(root_row[entry]), last - first
        if not 0 <= root < size:
            continue
        nodes = list(range(root, min(size, root + MAX_NODES)))
        start = int(sample_start[entry])
        path, emitted = [root], [int(sampled[start])]
        while emitted[-1] >= 0 and len(path) < limit:
            held = [
                n for n in nodes if n > path[-1] and parent[first + n] == path[-1] and tokens[first + n] == emitted[-1]
            ]
            if not held:
                break
            path.append(held[0])
            emitted.append(int(sampled[start + held[0] - root]))
        count = len(path)
        result.counts[entry] = count
        result.rows[entry, :count] = result.rows.new_tensor(path)
        result.emitted[entry, :count] = result.emitted.new_tensor(emitted)
        for at in range(1, count):
            if path[at] != root + at:
                result.move_source[entry, at - 1] = _global_slot(page_table[entry], ctx + path[at], n_pages)
                result.move_target[entry, at - 1] = _global_slot(page_table[entry], ctx + root + at, n_pages)
                result.n_moves[entry] = count - 1


def _global_slot(pages: Tensor, slot: int, n_pages: int) -> int:
    if not 0 <= slot < pages.shape[0] * PAGE_SIZE:
        return -1
    page = int(pages[slot // PAGE_SIZE])
    return page * PAGE_SIZE + slot % PAGE_SIZE if 0 <= page < n_pages else -1
