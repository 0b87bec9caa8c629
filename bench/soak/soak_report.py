"""What a soak came to."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from bench.soak.look import Look, Use
from bench.soak.soak_plan import SoakPlan
from bench.soak.tally import Tally
from bench.soak.trend import slope

MIB = 1 << 20
SPARE = 2  # threads and descriptors that one half of the looks may have over the other


@dataclass(frozen=True, slots=True)
class SoakReport:
    """``looks``: one per shift, at rest. ``answers``: what the same prompt was answered after each."""

    plan: SoakPlan
    tally: Tally
    looks: Seq[Look]
    answers: Seq[str]
    stops: int

    @property
    def judged(self) -> Seq[Look]:
        """The looks after the warm-up."""
        return self.looks[math.ceil(len(self.looks) * self.plan.warm_up) :]

    def growth(self, process: str) -> dict[str, float] | None:
        """MiB that ``process`` grew from the first judged look to the last, and per hour, by the fitted slope, and what
        it may; None with too few looks."""
        looks = self.judged
        per_s = slope([one.at_s for one in looks], [one.processes[process].own_bytes for one in looks])
        if per_s is None:
            return None
        size = looks[-1].processes[process].own_bytes
        return {
            "mib": round(per_s * (looks[-1].at_s - looks[0].at_s) / MIB, 3),
            "mib_per_hour": round(per_s * 3600 / MIB, 3),
            "limit_mib": round(self.plan.growth_mib + self.plan.growth_share * size / MIB, 3),
            "size_mib": round(size / MIB, 1),
        }

    def faults(self) -> list[str]:
        """Everything that must not be; empty for a server that stays up."""
        found = [f"{count} x {line}" for line, count in self.tally.faults.most_common()]
        for number, one in enumerate(self.looks, 1):
            if not one.at_rest:
                found.append(f"look {number}: nobody was there, and yet {one.left} were held")
            if one.restarts:
                found.append(f"look {number}: the engine had been restarted {one.restarts} times")
        if len(set(self.answers)) > 1:
            found.append(f"one prompt was answered in {len(set(self.answers))} ways: {sorted(set(self.answers))[:3]}")
        for process in ("frontend", "engine"):
            found += self._creep(process)
        return found

    def _creep(self, process: str) -> list[str]:
        grown = self.growth(process)
        found = []
        if grown is not None and grown["mib"] > grown["limit_mib"]:
            found.append(f"{process}: memory grew by {grown['mib']} MiB after the warm-up, over {grown['limit_mib']}")
        half = len(self.judged) // 2
        for name in ("files", "threads"):
            first, second = (
                max((_count(one.processes[process], name) for one in part), default=0)
                for part in (self.judged[:half], self.judged[half:])
            )
            if half and second > first + SPARE:
                found.append(f"{process}: {name} at rest went from {first} to {second}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: every figure."""
        faults = self.faults()
        return {
            "ok": not faults, "faults": faults, "minutes": self.plan.minutes, "clients": self.plan.clients,
            "visits": self.tally.visits, "outcomes": self.tally.as_dict(), "stops": self.stops,
            "answer": self.answers[0] if self.answers else None,
            "growth": {process: self.growth(process) for process in ("frontend", "engine")},
            "looks": [_row(one) for one in self.looks],
        }  # fmt: skip


def _count(use: Use, name: str) -> int:
    found: int = getattr(use, name)
    return found


def _row(one: Look) -> dict[str, Any]:
    found: dict[str, Any] = {"minute": round(one.at_s / 60, 2), "visits": one.visits, **one.held, "calls": one.calls}
    for name, use in one.processes.items():
        found |= {
            f"{name}_mib": round(use.own_bytes / MIB, 1), f"{name}_files": use.files, f"{name}_threads": use.threads,
        }  # fmt: skip
    return found
