"""How deep trees grow: which of them are worth another level of a model-based drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.control.inputs import TreeExpansion
from specdec.control.params import ControlParams


def expansion_floor(rate: float, level_ms: float, row_ms: float, agreement: float, params: ControlParams) -> float:
    """Log of the lowest chance of being reached at which a node's expansion earns its share of a level and its row.

    rate: tokens per millisecond that the batch earns otherwise. level_ms: a sequence's share of a level.
    """
    price = rate * (level_ms + row_ms) / agreement
    return math.log(min(params.max_level_price, price))


def trees_to_expand(expansion: TreeExpansion, reached: Sequence[float], depth: int, others: int = 0) -> int:
    """Number of growing trees that get another level.

    A tree's expansion earns reached * agreement tokens. It costs its share of the level and one more verified row, at
    the rate that the batch earns otherwise.

    reached: per tree, best first, the chance that its best leaf is reached; all leaves have this ``depth``. others:
    trees that grow in any case and share the level's price.
    """
    if expansion.cost is None:
        return len(reached)
    level_ms, verify, rate = expansion.cost.ms, expansion.verify, expansion.rate
    best, count, tokens = 0.0, 0, 0.0
    paid = level_ms(others) if others else 0.0
    nodes, last = depth * (len(reached) + others), len(verify) - 1
    # In a full forward a new node replaces another one.
    verified = [verify[min(nodes + n, last)] - verify[min(nodes, last)] for n in range(len(reached) + 1)]
    for n, chance in enumerate(reached, 1):
        tokens += chance * expansion.agreement
        worth = tokens - rate * (level_ms(others + n) - paid + verified[n])
        if worth > best:
            best, count = worth, n
    return count
