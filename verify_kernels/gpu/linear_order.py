"""In what order a linear layer adds up its products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearOrder:
    """All that the bits of a result depend on besides the numbers themselves; a function of the weight alone.

    Input channels are taken in blocks of ``block_k``; the blocks are dealt to ``split_k`` runs of consecutive ones.
    Within a run products are added in order, by one kind of instruction; the runs' sums are then added in order.
    """

    block_k: int
    split_k: int
