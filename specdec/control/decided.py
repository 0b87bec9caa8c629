"""What a step's decisions were made on and what they were, as learning from its outcome needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.control.turn import Turn
from specdec.tree import TokenTree


@dataclass(slots=True)
class Decided:
    """row_ms, token_ms: milliseconds that a row, and a token without drafts, were expected to take. asked: per turn
    whether the free drafters were. chosen: per turn the merged tree and the nodes of it to be verified. bound: the step
    was not free to decide, or says nothing of decoding: prompts were read, or someone's wish came first. prefill_rows:
    of those prompts."""

    turns: Sequence[Turn] = ()
    row_ms: float = 0.0
    token_ms: float = 1.0
    asked: Sequence[bool] = ()
    chosen: list[tuple[TokenTree, list[int]]] = field(default_factory=list)
    bound: bool = False
    prefill_rows: int = 0
