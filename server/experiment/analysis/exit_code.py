"""Exit codes, so that a pipeline can act on a verdict."""

from __future__ import annotations

from typing import Literal

from server.experiment.analysis.verdict import VerdictKind

Demand = Literal["better", "not-worse", "none"]

_CODES: tuple[tuple[VerdictKind, int], ...] = (
    ("better", 13),
    ("equivalent", 13),
    ("worse", 10),
    ("undecided", 11),
    ("invalid", 12),
)
FALSE_ALARMS = 14
"""`specdec ab check` found more differences between equal arms than chance explains."""


def exit_code(kind: VerdictKind, demand: Demand) -> int:
    """0 when the verdict is what was demanded: `better`, or `not-worse` (better or equivalent). Else 10 for worse, 11
    undecided, 12 invalid, 13 equivalent where better was demanded. `none` demands only that the run was valid."""
    wanted: dict[Demand, tuple[VerdictKind, ...]] = {
        "better": ("better",),
        "not-worse": ("better", "equivalent"),
        "none": ("better", "equivalent", "worse", "undecided"),
    }
    return 0 if kind in wanted[demand] else dict(_CODES)[kind]
