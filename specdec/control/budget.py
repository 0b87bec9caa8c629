"""Which draft nodes of all running sequences are worth verifying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.control.turn import Turn
from specdec.tree import TokenTree

WORTHWHILE = 1.015  # less is within what the estimates err, and larger trees cost the host some time too


@dataclass(slots=True)
class Choice:
    """kept: per tree the nodes to verify, best first. predicted_tokens: expected tokens of the step, the target's own
    included. value: expected tokens per millisecond."""

    kept: list[list[int]]
    budget: int
    candidates: int
    predicted_tokens: float
    value: float


def choose(
    turns: Sequence[Turn],
    trees: Sequence[TokenTree],
    curve: NDArray[np.float64],
    fixed_rows: int,
    draft_ms: float,
    rate: float = 0.0,
    prompts_ms: float = 0.0,
) -> Choice:
    """Maximise (N + sum of the B best chances) / (draft_ms + curve[fixed_rows + B] - prompts_ms) over B (DESIGN
    section 7), but no further than the last node earns ``rate``, the tokens per millisecond that other steps earn: a
    step that is slow already, since drafting it took long, makes none of its tokens worth more. Nor do prompts, which
    add ``prompts_ms`` to the forward.

    One heap over all sequences; since no chance exceeds its parent's, the best B always form trees. Nodes of forced
    turns, and those a lagging turn needs to keep its objective, come before all others and are not up for decision.
    ``curve``: milliseconds by rows; ``fixed_rows``: those computed anyway, the pending tokens among them.
    """
    owners: list[int] = []
    nodes: list[int] = []
    flat: list[float] = []
    for i, tree in enumerate(trees):
        n = len(tree.tokens) - 1
        if not n:
            continue
        scores = tree.capped_scores()
        mine = list(range(1, n + 1))
        if n > turns[i].nodes:  # what may not be verified has no part in the decision
            mine = sorted(mine, key=lambda node: (-scores[node], node))[: turns[i].nodes]
        owners += [i] * len(mine)
        nodes += mine
        trust = math.log(turns[i].control.trust.value)
        flat += [min(0.0, scores[node] + trust) for node in mine]
    kept: list[list[int]] = [[] for _ in trees]
    if not flat:
        return plain(turns, float(curve[fixed_rows]) - prompts_ms, draft_ms)
    chances = np.exp(np.asarray(flat))
    must = _must(turns, owners, chances)
    order = np.lexsort((np.arange(len(flat)), -chances, ~must))  # stable: a parent before its child of equal chance
    least = int(must.sum())
    most = max(least, min(len(flat), len(curve) - 1 - fixed_rows))
    tokens = len(turns) + np.concatenate(([0.0], np.cumsum(chances[order])))
    rows = np.minimum(fixed_rows + np.arange(least, most + 1), len(curve) - 1)
    spent_ms = draft_ms + curve[rows] - prompts_ms
    values = tokens[least : most + 1] / spent_ms
    best = least + min(int(values.argmax()), int((tokens[least : most + 1] - rate * spent_ms).argmax()))
    if least == 0 and values[best] < WORTHWHILE * values[0]:
        best = 0
    for at in order[:best].tolist():
        kept[owners[at]].append(nodes[at])
    return Choice(kept, best, len(flat), float(tokens[best]), float(values[best - least]))


def plain(turns: Sequence[Turn], verify_ms: float, draft_ms: float) -> Choice:
    """The choice where there is none: no drafter proposed anything, and the forward takes ``verify_ms``."""
    return Choice([[] for _ in turns], 0, 0, float(len(turns)), len(turns) / max(draft_ms + verify_ms, 1e-9))


def _must(turns: Sequence[Turn], owners: Sequence[int], chances: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Nodes that are verified whatever they cost."""
    must = np.zeros(len(chances), bool)
    if not any(turn.forced or turn.lag > 0 for turn in turns):
        return must
    owned = np.asarray(owners)
    for i, turn in enumerate(turns):
        mine = np.flatnonzero(owned == i)
        if turn.forced:
            must[mine] = True
        elif turn.lag > 1 and mine.size:
            best = mine[np.argsort(-chances[mine], kind="stable")]
            reached = 1.0 + np.cumsum(chances[best])
            must[best[: int(np.searchsorted(reached, turn.lag)) + 1]] = True
    return must
