"""Sequences and trees for controller tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from specdec.control.controller import Controller
from specdec.control.inputs import DraftWork, Outcome, Plan, SequenceHistory, SequenceInputs, StepInputs
from specdec.core.tree import TokenTree

Edge = tuple[int, int, float]
"""(parent, token, chance given the parent)."""


def make_one(key: int = 1, **fields: Any) -> SequenceInputs:
    """A greedy sequence with generous limits; ``fields`` are those of `SequenceInputs`."""
    known = {"pending": 0, "nodes": 63, "room": 1000, "drafters": ("m", "s", "d")} | fields
    return SequenceInputs(SequenceHistory(key, 0), **known)  # type: ignore[arg-type]


def take_step(
    controller: Controller, sequences: Sequence[SequenceInputs], works: dict[str, DraftWork], prefill_rows: int = 0
) -> tuple[StepInputs, Plan]:
    """Run a step in which drafters did ``works``, whatever was requested, up to the plan of the rows to verify."""
    step = StepInputs(controller.estimates.prices([0] * len(sequences), prefill_rows), sequences, prefill_rows)
    plan = controller.decide(step)
    while plan.requests:
        for request in plan.requests:
            work = works.get(request.drafter, DraftWork([None] * len(sequences)))
            work.decisions, work.pending = work.decisions or request.decisions, request.pending
            step.drafted[request.drafter] = work
        plan = controller.decide(step)
    return step, plan


def outcome_of(plan: Plan, tokens: list[list[int]], verify_ms: float = 10.0, draft_ms: float = 0.0) -> Outcome:
    """The outcome of a step that sampled ``tokens``."""
    return Outcome(tokens, len(tokens) + plan.budget, 0.0, verify_ms, draft_ms)


def make_tree(edges: Sequence[Edge], source: str = "s", pending: int = 0, cells: Sequence[int] = ()) -> TokenTree:
    """A tree of these nodes, in order; an edge whose token its parent already has is merged."""
    tree = TokenTree(pending)
    for i, (parent, token, chance) in enumerate(edges):
        tree.add(parent, token, tree.scores[parent] + math.log(chance), source, cells[i] if cells else -1)
    return tree


def chain(chances: Sequence[float], tokens: Sequence[int] = (), **fields: Any) -> TokenTree:
    """A tree that is one path."""
    named = tokens or range(1, len(chances) + 1)
    return make_tree(
        [(i, token, chance) for i, (token, chance) in enumerate(zip(named, chances, strict=True))], **fields
    )


@st.composite
def trees(draw: st.DrawFn, most: int = 8, source: str = "s", tokens: int = 3) -> TokenTree:
    """Any tree of at most ``most`` draft nodes; siblings' chances may sum to more than 1, and may tie."""
    tree = TokenTree(0)
    for _ in range(draw(st.integers(0, most))):
        parent = draw(st.integers(0, len(tree) - 1))
        chance = draw(st.sampled_from([1.0, 0.9, 0.5, 0.25, 0.1]) | st.floats(0.01, 1.0))
        tree.add(parent, draw(st.integers(0, tokens - 1)), tree.scores[parent] + math.log(chance), source)
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """Token paths of all draft nodes."""
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}
