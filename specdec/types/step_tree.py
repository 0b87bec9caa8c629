"""The tree of one verify step, as a request may ask to see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTree:
    """What was verified for one sequence in one step, and what came of it.

    tokens, parents (-1 for the root), chances (estimated chance that the node is reached, 1.0 for the root) and sources
    (names of the drafters that proposed it, none for the root) are parallel, in topological order; node 0 is the token
    said last. accepted: the nodes whose tokens this Delta begins with, in order; a token after theirs is the target's
    own. draft_ms, verify_ms: milliseconds of the step, shared by all sequences in it.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]
    sources: list[list[str]]
    accepted: list[int]
    draft_ms: float
    verify_ms: float
