"""What a step yielded, as the controller learns from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.tree import TokenTree


@dataclass(slots=True)
class DraftWork:
    """One drafter's work in a step: its tree per turn (None: not asked), forwards run, milliseconds taken."""

    trees: list[TokenTree | None]
    levels: int = 0
    ms: float = 0.0


@dataclass(slots=True)
class Outcome:
    """tokens: per turn the tokens committed. work: by drafter. rows, context, verify_ms: the forward and its time.
    draft_ms: the whole propose stage, drafters and all."""

    tokens: list[list[int]]
    rows: int
    context: float
    verify_ms: float
    work: dict[str, DraftWork] = field(default_factory=dict)
    draft_ms: float = 0.0
