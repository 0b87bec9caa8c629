"""What the controller is told of a step, what it answers, and what it remembers of each sequence: plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.control.costs import CostTable
from specdec.core.tree import TokenTree


@dataclass(slots=True)
class Ratio:
    """Observed over expected, as a running ratio shrunk to 1.

    ``prior``: expectations that weigh as much as that. ``keep``: what is left of an observation's weight after the
    next.
    """

    prior: float
    least: float
    most: float
    keep: float = 0.98
    observed: float = 0.0
    expected: float = 0.0

    @property
    def value(self) -> float:
        """The ratio, within ``least`` and ``most``."""
        found = (self.observed + self.prior) / (self.expected + self.prior)
        return max(self.least, min(self.most, found))

    def add(self, expected: float, observed: float) -> None:
        """``observed`` came where ``expected`` was predicted."""
        self.observed = self.keep * self.observed + observed
        self.expected = self.keep * self.expected + expected


@dataclass(slots=True)
class DraftRecord:
    """What a drafter brought, as fading sums over the ``steps`` in which it was asked: tokens accepted of its own tree,
    levels (forwards) run, nodes verified. ``idle``: steps since it was asked last."""

    steps: float = 0.0
    tokens: float = 0.0
    levels: float = 0.0
    rows: float = 0.0
    idle: int = 0

    def add(self, keep: float, tokens: float, levels: float, rows: float) -> None:
        """One step more, after which what was known weighs ``keep`` of what it did."""
        self.steps = keep * self.steps + 1.0
        self.tokens = keep * self.tokens + tokens
        self.levels = keep * self.levels + levels
        self.rows = keep * self.rows + rows


@dataclass(slots=True)
class SequenceHistory:
    """What drafting brought on one sequence; ``key`` numbers sequences in order of entry, ``bucket`` is its
    temperature's. rates: per lookup drafter that proposed for it, how its chances held. asked: model-based drafters
    that read it."""

    key: int
    bucket: int
    emitted: int = 0
    records: dict[str, DraftRecord] = field(default_factory=dict)
    rates: dict[str, Ratio] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


@dataclass(slots=True)
class SequenceInputs:
    """A sequence that samples in this step.

    pending: its last token, the root of its tree. nodes: draft nodes it may have verified at most. room: tokens it may
    still emit. drafters: who may propose for it now. forced: mode ON, everything proposed is verified. due: tokens this
    step should yield for it to keep its latency objective, 0 without one. first: this step computes the end of its
    prompt, so its first token waits for whatever is drafted. backlog: per model-based drafter, tokens that one must
    read before it can draft.
    """

    history: SequenceHistory
    pending: int
    nodes: int
    room: int
    drafters: Sequence[str]
    forced: bool = False
    due: float = 0.0
    first: bool = False
    backlog: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class DraftWork:
    """One drafter's work in a step: its tree per sequence (None: not asked), levels grown, milliseconds taken; and
    the decision per sequence that it followed from. reads: tokens read for sequences that it proposed nothing for."""

    trees: list[TokenTree | None]
    levels: int = 0
    ms: float = 0.0
    decisions: list[str] = field(default_factory=list)
    reads: int = 0

    @property
    def asked(self) -> bool:
        """Whether it was asked for any."""
        return any(decision not in ("", "off") for decision in self.decisions)


@dataclass(frozen=True, slots=True)
class StepPrices:
    """What the coming step is expected to cost, in milliseconds. plain_ms: its forward without drafts. decode_ms: of
    that, the rows that sample. row_ms: a row more. token_ms: a token, without drafts. rows: of the forward without
    drafts; context: tokens that a row looks back on."""

    plain_ms: float
    decode_ms: float
    row_ms: float
    token_ms: float
    rows: int
    context: float


@dataclass(slots=True)
class StepInputs:
    """All a decision rests on, besides what was learnt. prefill_rows: rows of prompts in the same forward. drafted: who
    was asked in this step so far, and what came of it."""

    prices: StepPrices
    sequences: Sequence[SequenceInputs]
    prefill_rows: int = 0
    drafted: dict[str, DraftWork] = field(default_factory=dict)

    @property
    def bound(self) -> bool:
        """Whether somebody's wish or a prompt had a say, so that the step tells nothing of free decisions."""
        return self.prefill_rows > 0 or any(one.forced or one.due > 0 for one in self.sequences)


@dataclass(frozen=True, slots=True)
class TreeExpansion:
    """Whether a model-based drafter should go one level deeper. cost: milliseconds of a level by sequences; None: not
    known. rate: tokens per millisecond that the batch earns otherwise. verify: milliseconds of the target's forward by
    draft nodes, from none. follow: share of reached nodes below which the drafter holds the target's choice. floor: log
    of the least chance of being reached at which a node is expanded."""

    cost: CostTable | None
    rate: float
    verify: Sequence[float]
    follow: float
    floor: float = -math.inf

    def keep(self, reached: Sequence[float], depth: int, others: int = 0) -> int:
        """How many of the growing trees go on for one level more. reached: the chance that each one's best leaf, at
        ``depth``, is reached, falling. others: trees that go on in any case and share the price."""
        if self.cost is None:
            return len(reached)
        best, kept, tokens = 0.0, 0, 0.0
        paid = self.cost.ms(others) if others else 0.0
        nodes, last = depth * (len(reached) + others), len(self.verify) - 1
        # Beyond what the forward may hold, a node takes another's place.
        verified = [self.verify[min(nodes + n, last)] - self.verify[min(nodes, last)] for n in range(len(reached) + 1)]
        for n, chance in enumerate(reached, 1):
            tokens += chance * self.follow
            worth = tokens - self.rate * (self.cost.ms(others + n) - paid + verified[n])
            if worth > best:
                best, kept = worth, n
        return kept


@dataclass(slots=True)
class DraftRequest:
    """A drafter's turn. decisions: per sequence `on`, `probe` (to find out), `forced`, `free` (a lookup drafter: a
    fraction of a millisecond), `read` (a piece of a long text, before it proposes), `off`, or `` where it may not.
    floors: per decision the log of the least chance of being reached for which a node is worth proposing. deepening: of
    a model-based drafter. reads: by the sequence's place, how many tokens to read."""

    drafter: str
    decisions: list[str]
    floors: dict[str, float]
    deepening: TreeExpansion | None = None
    reads: dict[int, int] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """For how many sequences it proposes."""
        return sum(decision in self.floors for decision in self.decisions)


@dataclass(slots=True)
class Plan:
    """What to do next. asks: the drafters whose turn it is; the decision goes on with what they proposed. Without any,
    the step is decided: trees: per sequence all proposals merged; kept: of each the nodes to verify, best first, out of
    ``candidates``. predicted_tokens: expected tokens of the step, the target's own included; value: per millisecond;
    verify_ms: expected time of the forward."""

    asks: list[DraftRequest] = field(default_factory=list)
    trees: list[TokenTree] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    candidates: int = 0
    predicted_tokens: float = 0.0
    value: float = 0.0
    verify_ms: float = 0.0

    @property
    def budget(self) -> int:
        """Draft nodes that are verified."""
        return sum(map(len, self.kept))


@dataclass(slots=True)
class Outcome:
    """tokens: per sequence the tokens committed. rows, context, verify_ms: the forward and its time. draft_ms: the
    whole propose stage, drafters and all."""

    tokens: list[list[int]]
    rows: int
    context: float
    verify_ms: float
    draft_ms: float = 0.0
