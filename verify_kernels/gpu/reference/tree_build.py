"""Depths and ancestor words in plain Python over torch tensors."""

from __future__ import annotations

from torch import Tensor


def tree_build(
    parent: Tensor,
    entry_of: Tensor,
    entry_start: Tensor,
    root_row: Tensor,
    depth: Tensor,
    anc: Tensor,
    *,
    max_depth: int,
) -> None:
    """Fill ``depth`` and ``anc``; see `verify_kernels.gpu.tree_build`."""
    depth.zero_()
    anc.zero_()
    starts, roots, owners, parents = entry_start.tolist(), root_row.tolist(), entry_of.tolist(), parent.tolist()
    for row, entry in enumerate(owners):
        if not 0 <= entry < len(roots) or not starts[entry] <= row < starts[entry + 1]:
            continue
        first = starts[entry]
        root = roots[entry] if roots[entry] >= 0 else starts[entry + 1] - first - 1
        path = _climb(parents, first, row - first, root)
        below = sum(node > root for node in path)
        if below > max_depth:
            continue
        depth[row] = len(path) - 1
        bits = sum(1 << node for node in path)
        anc[row] = anc.new_tensor([_signed(bits >> 64 * word & (2**64 - 1)) for word in range(anc.shape[1])])


def _climb(parents: list[int], first: int, node: int, root: int) -> list[int]:
    """``node`` and all above it; a parent that does not precede its child ends the climb."""
    path = [node]
    while node > root:
        up = parents[first + node]
        if not 0 <= up < node:
            return path
        node = up
        path.append(node)
    return path + list(range(node))


def _signed(word: int) -> int:
    """64 bits as an int64 holds them."""
    return word - 2**64 if word >= 2**63 else word
