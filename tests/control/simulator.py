"""A simulated target and simulated drafters: a real controller decides with known costs and probabilities."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.protocol import DraftTask
from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import DraftRequest, DraftWork, Outcome, SequenceInputs, StepInputs
from specdec.control.learning import Estimates
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.control.policies.how_deep import trees_to_expand
from specdec.core.tree import TokenTree
from tests.draft.helpers import make_sequence, make_task

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
WRONG = 1_000_000  # token ids from here on are never the target's
PROBE_DEPTH, EXPANDED = 3, 4  # as in the drafting stage and in draft models
DEPTH, NODES = 12, 31


@dataclass(frozen=True, slots=True)
class Skilled:
    """A drafter: how often its n-th choice is right on positions of two kinds, easy and hard; how confident it is in
    its first (None: exactly). ``level_ms``: cost of a level for a batch; None makes it a free one."""

    name: str
    easy: tuple[float, ...]
    hard: tuple[float, ...]
    easy_share: float = 0.5
    claims: float | None = None
    level_ms: Callable[[int], float] | None = None


@dataclass(slots=True)
class Tally:
    """The totals of a run. active: steps in which each drafter ran; verified: draft nodes."""

    tokens: int = 0
    ms: float = 0.0
    verified: int = 0
    active: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


@dataclass(slots=True)
class World:
    """verify_ms: true price of a forward by rows. noise: spread of measured times, as a factor's logarithm."""

    drafters: Seq[Skilled]
    verify_ms: Callable[[int], float]
    sequences: int = 1
    noise: float = 0.05
    seed: int = 1
    _rng: random.Random = field(default_factory=lambda: random.Random(1))
    _ranks: dict[tuple[str, int, int], tuple[int, float]] = field(default_factory=dict)

    def rank(self, drafter: Skilled, sequence: int, position: int) -> tuple[int, float]:
        """Which of the drafter's choices is right at a position (-1: none), and the chance it gives its first."""
        found = self._ranks.get((drafter.name, sequence, position))
        if found is None:
            draws = random.Random(f"{self.seed} {sequence} {position} {drafter.name}")
            chances = drafter.easy if draws.random() < drafter.easy_share else drafter.hard
            draw, at = draws.random(), 0
            while at < len(chances) and draw >= chances[at]:
                draw, at = draw - chances[at], at + 1
            claim = chances[0] if drafter.claims is None else drafter.claims
            found = at if at < len(chances) else -1, claim
            self._ranks[drafter.name, sequence, position] = found
        return found

    def timed(self, ms: float) -> float:
        """A noisy measurement of a true time of ``ms``."""
        return ms * math.exp(self._rng.gauss(0.0, self.noise))

    def table(self, price: Callable[[int], float]) -> CostTable:
        """The table that a start-up measurement would find."""
        return CostTable(ROWS, [0], [[price(rows) for rows in ROWS]])

    def controller(self, probe_every: int = 16) -> Controller:
        """A fresh controller over true costs."""
        costly = {d.name: self.table(d.level_ms) for d in self.drafters if d.level_ms is not None}
        params = dataclasses.replace(PARAMS, probe_every=probe_every)
        models = {d.name: d.level_ms is not None for d in self.drafters}
        return Controller(Estimates(models, self.table(self.verify_ms), costly, params=params))


def children(world: World, drafter: Skilled, sequence: int, position: int, right: bool) -> list[tuple[int, float]]:
    """Tokens and chances the drafter offers at a position; none is right behind an error (``right`` False)."""
    rank, first = world.rank(drafter, sequence, position)
    width = max(len(drafter.easy), len(drafter.hard))
    second = min(1.0, first) * 0.4 * (1.0 - first)
    return [
        (
            position if right and n == rank else WRONG + 64 * position + 8 * n + len(drafter.name),
            first if n == 0 else second,
        )
        for n in range(width)
    ]


@dataclass(slots=True)
class Growth:
    """One sequence's tree while it grows. right: per node whether it is on the target's way."""

    task: DraftTask
    sequence: int
    position: int
    tree: TokenTree
    right: dict[int, bool] = field(default_factory=lambda: {0: True})
    frontier: list[int] = field(default_factory=lambda: [0])

    def advance(self, world: World, drafter: Skilled) -> None:
        """One level more, as a draft model grows it."""
        fresh = []
        for node in self.frontier:
            at = self.position + self.tree.depths[node]
            offers = children(world, drafter, self.sequence, at, self.right[node])[: self.task.width]
            for rank, (token, prob) in enumerate(offers):
                child = self.task.add(self.tree, node, token, prob, rank)
                if child >= 0:
                    self.right[child] = self.right[node] and token == at
                    fresh.append(child)
        deep = [
            node
            for node in fresh
            if self.tree.scores[node] >= self.task.level_floor and self.tree.depths[node] < self.task.max_depth
        ]
        self.frontier = sorted(deep, key=lambda node: -self.tree.scores[node])[:EXPANDED]

    def reached(self) -> float:
        """Log of the chance that the best node of the frontier is reached."""
        return max(self.tree.scores[node] for node in self.frontier)


def worth_expanding(growing: list[Growth]) -> list[Growth]:
    """As `draft.growth.worth_expanding`, for the growths of this module."""
    active = sorted(growing, key=Growth.reached, reverse=True)
    expansion = active[0].task.expansion if active else None
    if expansion is None:
        return growing
    depth = active[0].tree.depths[active[0].frontier[0]]
    return active[: trees_to_expand(expansion, [math.exp(growth.reached()) for growth in active], depth)]


def walk(tree: TokenTree, position: int) -> list[int]:
    """Tokens the target emits: the right path of the tree and one more."""
    node = 0
    tokens: list[int] = []
    while True:
        token = position + len(tokens)
        tokens.append(token)
        child = tree.child(node, token)
        if child is None:
            return tokens
        node = child


class Simulation:
    """Steps of a controller in a simulated world. Positions continue from call to call.

    lengths: fewest and most tokens of an answer, after which another request replaces it; None: answers never end.
    prompt: tokens that a model-based drafter must prefill for each request, at the cost of a level of as many rows;
    0: no prefill, neither of a prompt nor of tokens that it missed.
    machine: factors by which reading the weights, the arithmetic of the rows, and drafting take longer than in the
    world, in a step of this number.
    overhead_ms: fixed cost of running a drafter.
    target_ms: objective of the first sequence, milliseconds per token; 0: none.
    """

    def __init__(
        self,
        world: World,
        controller: Controller | None = None,
        lengths: tuple[int, int] | None = None,
        prompt: int = 0,
        machine: Callable[[int], tuple[float, float, float]] = lambda step: (1.0, 1.0, 1.0),
        overhead_ms: float = 0.0,
        target_ms: float = 0.0,
    ) -> None:
        self.world = world
        self.controller = controller or world.controller()
        self.overhead_ms = overhead_ms
        self._target_ms, self._elapsed_ms = target_ms, 0.0
        self.ended = 0  # requests
        self._lengths, self._prompt, self._machine, self._steps = lengths, prompt, machine, 0
        self._rng = random.Random(5)
        n = world.sequences
        self._positions = [1] * n
        self._first = [lengths is not None] * n
        self._left = [0] * n
        self._emitted = [0] * n
        self._pending: list[dict[str, int]] = [{} for _ in range(n)]
        self.histories = [self.controller.enter(0.0) for _ in range(n)]
        for i in range(n):
            self._begin(i)
        self._borrowed = make_task(make_sequence([0]))  # the simulated drafters look at neither

    def renew(self) -> None:
        """Replace the running requests with new ones."""
        for i in range(len(self.histories)):
            self.histories[i] = self.controller.enter(0.0)
            self._begin(i)

    def run(self, steps: int, forced: bool = False) -> Tally:
        """Run ``steps`` steps; returns their totals."""
        tally = Tally()
        for _ in range(steps):
            self._step(tally, forced)
        return tally

    def serve(self, requests: int) -> Tally:
        """Until so many more requests have ended."""
        tally, until = Tally(), self.ended + requests
        while self.ended < until:
            self._step(tally, False)
        return tally

    def ms_per_token(self, first: int, last: int) -> float:
        """Mean of the sequences ``first`` to ``last`` since the start."""
        tokens = sum(position - 1 for position in self._positions[first : last + 1])
        return (last + 1 - first) * self._elapsed_ms / tokens

    def _begin(self, i: int) -> None:
        self._emitted[i] = 0
        self._left[i] = 10**9 if self._lengths is None else self._rng.randint(*self._lengths)
        self._first[i] = self._lengths is not None
        reading = [d.name for d in self.world.drafters if d.level_ms is not None and self._prompt]
        self._pending[i] = dict.fromkeys(reading, self._prompt)

    def _step(self, tally: Tally, forced: bool) -> None:
        world, controller, n = self.world, self.controller, len(self.histories)
        self._steps += 1
        reading, arithmetic, drafting = self._machine(self._steps)
        names = tuple(drafter.name for drafter in world.drafters)
        prices = controller.estimates.prices([0] * n)
        sequences = [
            SequenceInputs(self.histories[i], self._positions[i] - 1, NODES, 512, names, forced,
                           self._due(prices.plain_ms) if i == 0 else 0.0, self._first[i],
                           {name: (tokens, tokens) for name, tokens in self._pending[i].items()}, self._emitted[i])
            for i in range(n)
        ]  # fmt: skip
        step = StepInputs(prices, sequences)
        plan = controller.decide(step)
        while plan.requests:
            for request in plan.requests:
                work = step.drafted[request.drafter] = self._draft(request, step, drafting)
                if request.proposing:
                    tally.active[request.drafter] = tally.active.get(request.drafter, 0) + 1
                for i, tree in enumerate(work.trees):
                    if tree is not None and request.drafter in self._pending[i]:
                        self._pending[i][request.drafter] = 0
            plan = controller.decide(step)
        draft_ms = sum(done.ms + self.overhead_ms * bool(done.levels) for done in step.drafted.values())
        chosen = [tree.subtree(kept) for tree, kept in zip(plan.trees, plan.kept, strict=True)]
        tokens = [walk(tree, at) for tree, at in zip(chosen, self._positions, strict=True)]
        rows = sum(map(len, chosen))
        first_ms = world.verify_ms(1)
        true_ms = first_ms * reading + (world.verify_ms(rows) - first_ms) * arithmetic
        controller.observe(step, plan, Outcome(tokens, rows, 0.0, world.timed(true_ms), draft_ms))
        tally.tokens += sum(map(len, tokens))
        tally.ms += true_ms + draft_ms
        self._elapsed_ms += true_ms + draft_ms
        tally.verified += rows - n
        for i, new in enumerate(tokens):
            self._commit(i, len(new))

    def _due(self, step_ms: float) -> float:
        """Tokens that a step of ``step_ms`` must yield for the first sequence to meet its objective."""
        if not self._target_ms:
            return 0.0
        return max(0.0, (self._elapsed_ms + step_ms) / self._target_ms - (self._positions[0] - 1))

    def _commit(self, i: int, tokens: int) -> None:
        self._positions[i] += tokens
        self._left[i] -= tokens
        self._emitted[i] += tokens
        self._first[i] = False
        self._pending[i] = {name: pending + tokens for name, pending in self._pending[i].items()}
        if self._left[i] <= 0:
            self.ended += 1
            self.histories[i] = self.controller.enter(0.0)
            self._begin(i)

    def _draft(self, request: DraftRequest, step: StepInputs, drafting: float) -> DraftWork:
        """Trees of the drafting sequences, grown together: the cost of a level depends on the sequences that are still
        growing."""
        drafter = next(drafter for drafter in self.world.drafters if drafter.name == request.drafter)
        trees: list[TokenTree | None] = [None] * len(request.decisions)
        growing = []
        for i, (decision, floor) in enumerate(zip(request.decisions, request.floors, strict=True)):
            if floor is not None:
                tree = trees[i] = TokenTree(self._positions[i] - 1)
                task = self._task(request, step.sequences[i], decision, floor)
                growing.append(Growth(task, i, self._positions[i], tree))
        ms, reads = 0.0, sum(request.prefill.values())
        for i, piece in request.prefill.items():
            self._pending[i][request.drafter] -= piece
        pending = reads + sum(self._pending[growth.sequence].get(request.drafter, 0) for growth in growing)
        if drafter.level_ms is not None and pending > 16 * len(growing):
            ms += drafter.level_ms(len(growing) + pending) - (drafter.level_ms(len(growing)) if growing else 0.0)
        grown = bool(growing)
        while growing:
            ms += 0.0 if drafter.level_ms is None else drafter.level_ms(len(growing))
            for growth in growing:
                growth.advance(self.world, drafter)
            growing = worth_expanding([growth for growth in growing if growth.frontier])
        levels = max(1, *(max(tree.depths) for tree in trees if tree is not None), 1) if grown else 0
        return DraftWork(trees, levels, self.world.timed(ms * drafting) if ms else 0.0, request.decisions, reads,
                         request.pending)  # fmt: skip

    def _task(self, request: DraftRequest, one: SequenceInputs, decision: str, floor: float) -> DraftTask:
        sequence = self._borrowed.sequence
        odds = self.controller.odds(request.drafter, one)
        if one.forced:
            return DraftTask(sequence, one.nodes, DEPTH, 3, request.drafter, odds)
        depth = PROBE_DEPTH if decision == "probe" else DEPTH
        return DraftTask(sequence, one.nodes, depth, 3, request.drafter, odds, floor, request.expansion)


def fixed_rate(world: World, drafter: Skilled, depth: int, width: int, steps: int) -> float:
    """Tokens per millisecond of always drafting a chain ``depth`` long with ``width`` children at each of its nodes."""
    tokens, ms = 0, 0.0
    positions = [1] * world.sequences
    for _ in range(steps):
        rows = world.sequences * (1 + depth * width)
        for i, position in enumerate(positions):
            got = 0
            while got < depth:
                rank, _ = world.rank(drafter, i, position + got)
                if not 0 <= rank < width:
                    break
                got += 1
                if rank:
                    break  # the chain continues under the first choice only
            positions[i] += got + 1
            tokens += got + 1
        levels = 0.0 if drafter.level_ms is None else depth * drafter.level_ms(world.sequences)
        ms += world.verify_ms(rows) + levels
    return tokens / ms


def best_fixed(world: World, drafter: Skilled, steps: int = 300) -> tuple[float, tuple[int, int]]:
    """The best of all fixed settings, plain decode among them, and its depth and width."""
    settings = [(0, 1), *((depth, width) for depth in (1, 2, 3, 4, 6, 8, 12) for width in (1, 2))]
    return max((fixed_rate(world, drafter, *setting, steps), setting) for setting in settings)
