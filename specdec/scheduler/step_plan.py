"""What a step is to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.scheduler.plan_entry import PlanEntry
from specdec.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """``entries``: decoding sequences, then prefilling ones, each by importance.

    ``preempted`` lost their pages and wait again; ``admitted`` left the queue (no sequence is in both).
    ``prefilled``: prefill-only sequences that are complete without any row: finish them.
    """

    entries: list[PlanEntry] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    prefilled: list[Sequence] = field(default_factory=list)
