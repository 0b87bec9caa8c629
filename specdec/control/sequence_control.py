"""What the controller remembers of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.control.ratio import Ratio
from specdec.control.skill import Skill


def trust_ratio(pool: Ratio | None = None) -> Ratio:
    """Tokens that verified nodes brought over those they promised; ``pool``: that of all sequences."""
    return Ratio(prior=6.0, least=0.3, most=1.1, keep=0.98 if pool else 0.998, pool=pool)


@dataclass(slots=True)
class Usage:
    """What a costly drafter brings here: tokens accepted of its own tree, levels it ran, and nodes of it that were
    verified, per turn (averages).

    ``turns``: how many the averages are of; ``idle``: steps since it was asked; ``misses``: probes in a row that did
    not pay; ``price``: tokens a level must bring to pay, when last decided.
    """

    gain: float
    levels: float
    rows: float
    on: bool = True
    turns: int = 0
    idle: int = 0
    misses: int = 0
    price: float = 0.0


@dataclass(slots=True)
class FreeUse:
    """What the free drafters bring here: tokens per turn, less those that their rows cost (running average). ``idle``:
    turns since they were asked; ``misses``: askings in a row, while they pause, for nothing."""

    gain: float
    idle: int = 0
    misses: int = 0


@dataclass(slots=True)
class SequenceControl:
    """State of one sequence; ``key`` numbers sequences in order of entry, ``bucket`` is its temperature's.

    ``emitted``: tokens that came out so far. ``trust``: tokens that verified nodes brought over those they promised;
    the best of many estimates are mostly too high. ``free``: what asking the free drafters brings here, None before its
    first turn.
    """

    key: int
    bucket: int
    emitted: int = 0
    trust: Ratio = field(default_factory=trust_ratio)
    free: FreeUse | None = None
    skills: dict[str, Skill] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
