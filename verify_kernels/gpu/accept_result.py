"""Where `accept` leaves its results, on the device; allocated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """All int32; entries B, deepest walk M.

    counts [B]: rows of the walk, 0 where the entry has no tree, else 1 + accepted nodes. pending [B]: the token
    sampled at the walk's last row, which is the next step's root; -1 where there is none (no tree, or the row had no
    usable logit: a request that can not go on). rows [B, M + 1]: the walk, rows of the entry, the root first; -1
    beyond. emitted [B, M + 1]: the token sampled at each of them; -1 beyond. next_ctx [B]: slots filled when the
    moves are made. move_source, move_target [B, M], n_moves [B]: what `move_kv` takes; -1 beyond.
    """

    counts: Tensor
    pending: Tensor
    rows: Tensor
    emitted: Tensor
    next_ctx: Tensor
    n_moves: Tensor
    move_source: Tensor
    move_target: Tensor
    for_host: Tensor

    @staticmethod
    def allocate(entries: int, max_depth: int, device: torch.device) -> AcceptResult:
        """Views of one buffer. ``for_host`` is its part that a host wants: counts, pending, rows, emitted, in this
        order, side by side, so that one copy brings them.

        Raises:
            ValueError: entries < 1 or max_depth < 0.
        """
        if entries < 1 or max_depth < 0:
            raise ValueError(f"entries, max_depth: {entries} and {max_depth}; must be at least 1 and 0")
        walk, moves = (entries, max_depth + 1), (entries, max_depth)
        shapes = ((entries,), (entries,), walk, walk, (entries,), (entries,), moves, moves)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        views = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        return AcceptResult(*views, *[flat[: sum(sizes[:4])]])
