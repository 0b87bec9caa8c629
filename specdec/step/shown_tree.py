"""A verified tree as a request's answer shows it."""

from __future__ import annotations

import math

from specdec.tree import TokenTree
from specdec.types import StepTree


def shown_tree(tree: TokenTree, accepted: list[int], draft_ms: float, verify_ms: float) -> StepTree:
    """``tree`` in plain values. accepted: nodes whose tokens were taken, from the root down."""
    return StepTree(
        tokens=list(tree.tokens),
        parents=list(tree.parents),
        chances=[round(math.exp(min(score, 0.0)), 4) for score in tree.scores],
        sources=[list(names) for names in tree.sources],
        accepted=list(accepted),
        draft_ms=draft_ms,
        verify_ms=verify_ms,
    )
