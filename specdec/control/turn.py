"""One sequence's part in a step, as the controller sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.control.sequence_control import SequenceControl


@dataclass(slots=True)
class Turn:
    """A sequence that samples in this step.

    context: tokens before its pending one. nodes: draft nodes it may have verified at most. room: tokens it may still
    emit. forced: mode ON, everything proposed is verified. lag: how many tokens this step should yield for it to
    keep its latency objective, 0 without one. fresh: this step computes the end of its prompt, so its first token
    waits for whatever is drafted. backlog: per costly drafter, tokens that one must read before it can draft.
    """

    control: SequenceControl
    context: int
    nodes: int
    room: int
    forced: bool = False
    lag: float = 0.0
    fresh: bool = False
    backlog: dict[str, int] = field(default_factory=dict)
