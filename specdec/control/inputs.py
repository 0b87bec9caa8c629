"""What the controller reads and returns in a step, and its records per sequence: plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from specdec.control.estimates.costs import CostTable
from specdec.core.tree import TokenTree

Odds = Callable[[int, int, float], tuple[float, int]]
"""(rank, depth, drafter's probability) -> (log of the chance that such a node is accepted if its parent is, cell)."""


@dataclass(slots=True)
class Ratio:
    """Observed over expected, as a running ratio that starts at 1."""

    prior: float
    """Sum of expectations that the start at 1 counts for."""
    bounds: tuple[float, float]
    """Lower and upper bound of the ratio."""
    retention: float
    """Weight that observations keep per new one."""
    observed: float = 0.0
    expected: float = 0.0

    @property
    def value(self) -> float:
        """The ratio within its bounds."""
        lower, upper = self.bounds
        found = (self.observed + self.prior) / (self.expected + self.prior)
        return max(lower, min(upper, found))

    def add(self, expected: float, observed: float) -> None:
        """Add an observation."""
        self.observed = self.retention * self.observed + observed
        self.expected = self.retention * self.expected + expected


@dataclass(slots=True)
class DraftRecord:
    """Decaying sums over the steps in which a drafter proposed."""

    steps: float = 0.0
    tokens: float = 0.0  # accepted tokens of its own trees
    levels: float = 0.0  # forwards
    rows: float = 0.0  # nodes verified
    idle: int = 0  # steps since its last proposal

    def add(self, retention: float, tokens: float, levels: float, rows: float) -> None:
        """Add a step; earlier ones keep the share ``retention`` of their weight."""
        self.steps = retention * self.steps + 1.0
        self.tokens = retention * self.tokens + tokens
        self.levels = retention * self.levels + levels
        self.rows = retention * self.rows + rows


@dataclass(slots=True)
class SequenceHistory:
    """Results of drafting on one sequence."""

    key: int
    """Sequences are numbered in order of entry."""
    bucket: int
    """Index of the temperature (`temperature_bucket`)."""
    records: dict[str, DraftRecord] = field(default_factory=dict)
    """Per drafter."""
    rates: dict[str, Ratio] = field(default_factory=dict)
    """Per lookup drafter, accepted nodes over expected ones."""


class Match(IntEnum):
    """How much text the proposals of a lookup drafter follow."""

    NONE = 0
    """It has nothing to propose."""
    WEAK = 1
    """A single token: what followed it before follows it again in about one case of five."""
    STRONG = 2


class DraftDecision(StrEnum):
    """What a drafter does for one sequence in a step. The values are stored in traces."""

    INELIGIBLE = ""
    OFF = "off"
    ON = "on"
    PROBE = "probe"
    """Propose to find out whether the drafter pays."""
    FORCED = "forced"
    """Mode ON: propose whatever it costs."""
    FREE = "free"
    """A lookup drafter proposes: a fraction of a millisecond."""
    PREFILL = "read"
    """Compute a chunk of a long pending prefill, and propose in a later step."""


@dataclass(slots=True)
class SequenceInputs:
    """A sequence that samples in this step."""

    history: SequenceHistory
    pending: int
    """Its last token, the root of its tree."""
    nodes: int
    """Maximum draft nodes to verify."""
    room: int
    """Tokens that it may still emit."""
    drafters: Sequence[str]
    """Drafters that may propose for it now; lookup drafters only if they have a match (`Estimates.least_match`)."""
    forced: bool = False
    """Mode ON: every proposed node is verified."""
    due: float = 0.0
    """Tokens that this step should yield to meet its latency objective; 0 without an objective."""
    first: bool = False
    """This step computes the end of its prompt, so drafting would delay its first token."""
    pending_prefill: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per model-based drafter, tokens that it must compute before it can propose: if it reads the whole text, and if it
    reads the end alone."""
    emitted: int = 0
    """Output tokens so far."""


@dataclass(slots=True)
class DraftWork:
    """One drafter's work in a step."""

    trees: list[TokenTree | None]
    """Per sequence; None: it did not propose."""
    levels: int = 0
    """Forwards of a model-based drafter: one per tree level, or one in all (`Drafter.tree_rows`)."""
    ms: float = 0.0
    decisions: list[DraftDecision] = field(default_factory=list)
    """Per sequence."""
    prefilled: int = 0
    """Tokens computed for sequences with the decision PREFILL."""
    pending: list[int] = field(default_factory=list)
    """As in `DraftRequest`."""

    @property
    def ran(self) -> bool:
        """Whether it worked for any sequence."""
        return any(decision not in IDLE for decision in self.decisions)


IDLE = (DraftDecision.INELIGIBLE, DraftDecision.OFF)
"""Decisions with which a drafter does nothing."""


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Expected costs of the coming step, in milliseconds."""

    plain_ms: float
    """Its forward without drafts."""
    decode_ms: float
    """The part of `plain_ms` that sampling rows take."""
    row_ms: float
    """One further row."""
    token_ms: float
    """One token without drafts."""
    rows: int
    """Rows of the forward without drafts."""
    context: float
    """Mean tokens that a row attends to."""


@dataclass(slots=True)
class StepInputs:
    """Everything that a decision depends on, besides the estimates."""

    prices: StepPrices
    sequences: Sequence[SequenceInputs]
    prefill_rows: int = 0
    """Rows of prompts in the same forward."""
    drafted: dict[str, DraftWork] = field(default_factory=dict)
    """Drafters that have run in this step, with their results."""
    rested: int = 0
    """Steps before this one that were decoded plainly without a decision: nothing to propose, or `Plan.rest`."""

    @property
    def constrained(self) -> bool:
        """Whether a request's mode, an objective or a prompt shaped the step, so that it is no free decision."""
        return self.prefill_rows > 0 or any(one.forced or one.due > 1 for one in self.sequences)


@dataclass(frozen=True, slots=True)
class TreeExpansion:
    """Inputs of the decision whether a model-based drafter grows one more level (`policies.how_deep`)."""

    cost: CostTable | None
    """Milliseconds of a level by sequences; None: not measured yet."""
    rate: float
    """Tokens per millisecond that the batch earns otherwise."""
    verify: Sequence[float]
    """Milliseconds of the target's forward by draft nodes, from 0."""
    agreement: float
    """Share of reached nodes under which the drafter holds the target's choice."""
    floor: float = -math.inf
    """Log of the lowest chance of being reached at which a node is expanded."""


@dataclass(slots=True)
class DraftRequest:
    """A drafter's turn."""

    drafter: str
    decisions: list[DraftDecision]
    """Per sequence."""
    floors: list[float | None]
    """Per sequence, log of the lowest chance of being reached at which a node is proposed; None: nothing is."""
    expansion: TreeExpansion | None = None
    """Of a model-based drafter."""
    prefill: dict[int, int] = field(default_factory=dict)
    """Index of a sequence with the decision PREFILL -> tokens to compute."""
    pending: list[int] = field(default_factory=list)
    """Per sequence, tokens that the drafter must compute before it can propose: one of the two numbers of
    `SequenceInputs.pending_prefill`, or 0."""

    @property
    def proposing(self) -> int:
        """Number of sequences that it proposes for."""
        return sum(floor is not None for floor in self.floors)


@dataclass(slots=True)
class Plan:
    """What to do next: run the drafters in `requests` and decide again, or, if there are none, verify `kept`."""

    requests: list[DraftRequest] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)
    """Per sequence, all proposals merged."""
    kept: list[list[int]] = field(default_factory=list)
    """Per sequence, the nodes of its tree to verify, best first."""
    candidates: int = 0
    """Nodes that the selection chose from."""
    predicted_tokens: float = 0.0
    """Expected tokens of the step, the target's own included."""
    verify_ms: float = 0.0
    """Expected milliseconds of the forward."""
    rest: int = 0
    """Further steps of the same sequences that need no decision, unless this one had no match and one is found: plain
    decoding."""

    @property
    def budget(self) -> int:
        """Draft nodes that are verified."""
        return sum(map(len, self.kept))


@dataclass(slots=True)
class Outcome:
    """The result of a step."""

    tokens: list[list[int]]
    """Committed tokens per sequence."""
    rows: int
    """Rows of the forward."""
    context: float
    """Mean tokens that a row attends to."""
    verify_ms: float
    """Milliseconds of the forward; 0: not measured."""
    draft_ms: float = 0.0
    """Milliseconds of the propose stage, without the matches of lookup drafters."""
