"""What the controller is told of a step and what it remembers of each sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from specdec.tree import TokenTree


@dataclass(slots=True)
class Ratio:
    """Observed over expected, as a running ratio shrunk to that of ``pool`` (None: to 1).

    ``prior``: expectations that weigh as much as the pool's word. ``keep``: what is left of an observation's weight
    after the next one.
    """

    prior: float
    least: float
    most: float
    keep: float = 0.98
    pool: Ratio | None = None
    observed: float = 0.0
    expected: float = 0.0

    @property
    def value(self) -> float:
        """The ratio, within ``least`` and ``most``."""
        towards = 1.0 if self.pool is None else self.pool.value
        found = (self.observed + self.prior * towards) / (self.expected + self.prior)
        return max(self.least, min(self.most, found))

    def add(self, expected: float, observed: float) -> None:
        """``expected`` was hoped for and ``observed`` came."""
        self.observed = self.keep * self.observed + observed
        self.expected = self.keep * self.expected + expected
        if self.pool is not None:
            self.pool.add(expected, observed)


def _ratio() -> Ratio:
    return Ratio(prior=5.0, least=0.25, most=1.7)


@dataclass(slots=True)
class Skill:
    """How much better or worse a drafter does on this text than on texts in general: in finding the next token
    (``first``), and in going on where it was right (``deep``). Text that repeats in places is hard to enter and easy
    to follow."""

    first: Ratio = field(default_factory=_ratio)
    deep: Ratio = field(default_factory=_ratio)

    def factor(self, first: bool) -> float:
        """What a calibrated chance is to be multiplied by, of a first or of a deeper token."""
        return (self.first if first else self.deep).value


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


BINS = 10


class Reliability:
    """Per drafter, in ten bins of predicted chance: what was predicted, what happened, how often."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._bins = {name: [[0.0, 0.0, 0.0] for _ in range(BINS)] for name in drafters}

    def add(self, drafter: str, predicted: float, hit: bool) -> None:
        """A node whose parent was reached."""
        found = self._bins[drafter][min(BINS - 1, int(predicted * BINS))]
        found[0] += predicted
        found[1] += hit
        found[2] += 1.0

    def table(self) -> dict[str, list[tuple[float, float, float]]]:
        """Per drafter the bins that hold anything: (mean predicted, observed rate, nodes)."""
        return {name: [(p / n, h / n, n) for p, h, n in bins if n] for name, bins in self._bins.items()}
