"""The goodput controller: who drafts, how far, and which nodes are verified."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.control.calibration import MOST, Calibration, temperature_bucket
from specdec.control.costs import CostTable
from specdec.control.gates import SHORT_BACKLOG, Balance, CostlyGate, FreeGate, Pace
from specdec.control.state import DraftWork, Outcome, Ratio, Reliability, SequenceControl, Skill, Turn, trust_ratio
from specdec.control.tree_budget import Choice, choose, plain
from specdec.tree import TokenTree


@dataclass(slots=True)
class Decided:
    """row_ms, token_ms: milliseconds that a row, and a token without drafts, were expected to take. asked: per turn
    whether the free drafters were. chosen: per turn the merged tree and the nodes of it to be verified. bound: the step
    was not free to decide, or says nothing of decoding: prompts were read, or someone's wish came first. prefill_rows:
    of those prompts."""

    turns: Sequence[Turn] = ()
    row_ms: float = 0.0
    token_ms: float = 1.0
    asked: Sequence[bool] = ()
    chosen: list[tuple[TokenTree, list[int]]] = field(default_factory=list)
    bound: bool = False
    prefill_rows: int = 0


Odds = Callable[[int, int, float], tuple[float, int]]

REFRESH_EVERY = 12  # steps between recomputations of the calibrated chances
RATE_FADE = 0.1  # weight of one step in the running speed-up
LOWEST_CHANCE = 2e-3  # nodes less likely than this are never worth a row
LOOK_EVERY = 24  # steps with drafts in a row after which one goes without, to see what plain decoding takes now
LOOK_BELOW = 1.3  # where drafting wins less than this: what it is compared with must be known, not extrapolated
EXPLORES = 0.5  # of the price of a row: what may be proposed, since a node's chance is an estimate


class Controller:
    """Decides from numbers alone; a step calls, in order: `begin`, `free_gate`, `gate` for each costly drafter,
    `choose`, `observe`; `observe` may come as late as the next step's `choose`, with the `decided` of its own step.
    Everything it does is a function of those calls' arguments, so a trace of them in order replays it.

    drafters: name -> whether it is costly. verify: cost of the target's forward. drafting: per costly drafter the
    cost of one level by the number of sequences drafted together. probe_every: steps between probes of what is off.
    order: drafters as they are asked, the free ones first.
    """

    def __init__(
        self, drafters: Mapping[str, bool], verify: CostTable, drafting: Mapping[str, CostTable], probe_every: int
    ) -> None:
        self.verify = verify
        self.calibration = Calibration(tuple(drafters))
        self.reliability = Reliability(drafters)
        self._drafters, self._probe_every = dict(drafters), probe_every
        self.order = sorted(drafters, key=drafters.__getitem__)
        self._gates = {name: CostlyGate(name, table, probe_every) for name, table in drafting.items()}
        self._entered = self._steps = 0
        self._speedup = 1.0
        self._free = FreeGate()
        self._free_gain = 0.0  # tokens that the free drafters bring a turn, less what their rows cost
        self._balances: dict[int, Balance] = {}  # by the batch's size, in powers of two
        self._free_names = {name for name, costly in drafters.items() if not costly}
        self._trust: dict[int, Ratio] = {}
        self.decided = Decided()  # of the step that began last
        self._turns: Sequence[Turn] = ()
        self._fixed_rows, self._context, self._plain_ms, self._row_ms = 1, 0.0, 1.0, 0.0
        self._decode_ms, self._every_ms, self._prefills = 1.0, 1.0, False
        self._prompts = Ratio(prior=200.0, least=0.3, most=2.0)  # milliseconds they took over those of as many rows
        self._drafted, self._looks = 0, False  # steps with drafts since the last without; whether this one goes without

    def as_dict(self) -> dict[str, Any]:
        """What it was built from, as plain values."""
        return {
            "drafters": self._drafters,
            "verify": self.verify.as_dict(),
            "drafting": {name: gate.cost.as_dict() for name, gate in self._gates.items()},
            "probe_every": self._probe_every,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Controller:
        """A fresh controller from what `as_dict` gave."""
        drafting = {name: CostTable.from_dict(table) for name, table in data["drafting"].items()}
        return Controller(data["drafters"], CostTable.from_dict(data["verify"]), drafting, data["probe_every"])

    def enter(self, temperature: float) -> SequenceControl:
        """A sequence begins."""
        self._entered += 1
        return self.control(self._entered, temperature_bucket(temperature))

    def control(self, key: int, bucket: int) -> SequenceControl:
        """The state of a sequence that begins; `enter` numbers them."""
        pool = self._trust.setdefault(bucket, trust_ratio())
        return SequenceControl(key, bucket, trust=trust_ratio(pool))

    def begin(self, turns: Sequence[Turn], prefill_rows: int) -> None:
        """A step in which ``turns`` sample and ``prefill_rows`` rows of prompts are computed besides."""
        self._turns = turns
        n = len(turns)
        self._fixed_rows = n + prefill_rows
        self._context = sum([turn.context for turn in turns]) / n if n else 0.0
        # A prompt that is read beside them makes this step long; the time of those that decode is worth no less.
        self._decode_ms = max(self.verify.ms(max(n, 1), self._context), 1e-6)
        self._prefills = prefill_rows > 0
        self._every_ms = self.verify.ms(self._fixed_rows, self._context)
        self._plain_ms = self._decode_ms + self._prompts.value * max(0.0, self._every_ms - self._decode_ms)
        self._row_ms = (self.verify.ms(self._fixed_rows + 8, self._context) - self._every_ms) / 8
        self.decided = Decided(turns, self._row_ms, self._token_ms, prefill_rows=prefill_rows)

    @property
    def _token_ms(self) -> float:
        """Milliseconds that a token of this batch takes without drafts."""
        return self._decode_ms / max(len(self._turns), 1)

    @property
    def rate(self) -> float:
        """Tokens per millisecond that this batch is expected to earn by decoding; plainly, if drafting loses."""
        return max(self._speedup, 1.0) * len(self._turns) / self._decode_ms

    def node_floor(self, decision: str) -> float:
        """Log of the least chance of being reached for which a node is worth proposing; none when the point is to find
        out, on a probe or for `free` drafters now and then: a chance that fell too low could never be corrected."""
        if decision == "probe" or (decision == "free" and self._steps % self._probe_every == 0):
            return -math.inf
        return math.log(max(LOWEST_CHANCE, EXPLORES * self.rate * self._row_ms))

    def odds(self, drafter: str, turn: Turn) -> Odds:
        """How likely ``drafter``'s nodes are accepted on this sequence: (rank, depth, prob) -> (log chance, cell)."""
        bucket, cell_of = turn.control.bucket, self.calibration.cell
        log_chance = self.cell_odds(turn.control.skills.get(drafter))

        def odds(rank: int, depth: int, prob: float) -> tuple[float, int]:
            cell = cell_of(drafter, bucket, rank, depth, prob)
            return log_chance(cell, depth), cell

        return odds

    def cell_odds(self, skill: Skill | None) -> Callable[[int, int], float]:
        """Log of the chance of a node of (cell, depth), for a drafter with this `Skill` on the sequence."""
        chance_of, log = self.calibration.chance, math.log
        first, deep = (1.0, 1.0) if skill is None else (skill.factor(True), skill.factor(False))
        return lambda cell, depth: log(min(MOST, chance_of(cell) * (first if depth == 1 else deep)))

    def free_gate(self) -> list[bool]:
        """Per turn whether the free drafters are asked."""
        self.decided.bound = self._prefills or any(turn.forced or turn.lag > 0 for turn in self._turns)
        self._looks = self._drafted >= LOOK_EVERY and self._speedup < LOOK_BELOW and not self.decided.bound
        self.decided.asked = [] if self._looks else self._free.decide(self._turns, self._token_ms)
        return list(self.decided.asked) or [False] * len(self._turns)

    def gate(self, drafter: str, trees: Sequence[Sequence[TokenTree]], eligible: Sequence[bool]) -> list[str]:
        """Per turn whether costly ``drafter`` is asked (`on`, `probe`, `forced`) or not (`off`, ``).

        trees: per turn what the others proposed. eligible: whether the turn's request lets it draft here.
        """
        if self._looks or (self._balance(len(self._turns)).rests and not self.decided.bound):
            return ["off" if ok else "" for ok in eligible]
        covered = [_covered(own) for own in trees]
        allowed = [ok and (turn.forced or not turn.fresh) for ok, turn in zip(eligible, self._turns, strict=True)]
        gate = self._gates[drafter]
        gate.follow(self.verify.slowness)
        others_rate = (1.0 + max(0.0, self._free_gain)) / self._token_ms
        return gate.decide(self._turns, covered, allowed, others_rate, self._row_ms, self._decode_ms)

    def pace(self, drafter: str) -> Pace:
        """How deep costly ``drafter`` should go in this step."""
        return self._gates[drafter].pace(self.rate, self._row_ms)

    def choose(self, trees: Sequence[TokenTree], draft_ms: float) -> Choice:
        """The nodes to verify, one (merged) tree per turn; ``draft_ms`` was spent on proposing."""
        proposed = sum([len(tree.tokens) - 1 for tree in trees])
        if proposed:
            costs = self.verify.span(min(self._fixed_rows, self.verify.largest), proposed, self._context)
            prompts_ms = max(0.0, costs[0] - self._decode_ms)
            choice = choose(self._turns, trees, costs, draft_ms, self.rate, prompts_ms)
        else:
            choice = plain(self._turns, self._decode_ms, draft_ms)
        self.decided.chosen = list(zip(trees, choice.kept, strict=True))
        if self._turns and not self._prefills and not any(turn.forced for turn in self._turns):
            gained = choice.value * self._plain_ms / len(self._turns)
            self._speedup += RATE_FADE * (max(gained, 0.5) - self._speedup)
        return choice

    def predicted_ms(self, budget: int) -> float:
        """Expected milliseconds of this step's forward with ``budget`` draft nodes."""
        if not budget:
            return self._plain_ms
        return self._plain_ms + self.verify.ms(self._fixed_rows + budget, self._context) - self._every_ms

    def draft_ms(self, drafter: str, batch: int, levels: int) -> float:
        """Expected milliseconds of ``levels`` forwards of a costly drafter for ``batch`` sequences."""
        return levels * self._gates[drafter].cost.ms(batch)

    def observe(self, outcome: Outcome, decisions: Mapping[str, Sequence[str]], decided: Decided | None = None) -> None:
        """Learn from what a step yielded, of which `decided` was kept; None: the one that began last."""
        decided = decided or self.decided
        self._time(outcome, decided.prefill_rows)
        free_ms = outcome.draft_ms
        self._settle(outcome, decided)
        for name, work in outcome.work.items():
            gate = self._gates.get(name)
            if gate is not None:
                free_ms -= work.ms
            self._learn(name, work, outcome.tokens, gate, decisions.get(name, ()), decided)
        self._free.observe_ms(max(0.0, free_ms), sum(decided.asked))
        self._weigh(outcome, decisions, decided)
        self._drafted = self._drafted + 1 if any(kept for _, kept in decided.chosen) else 0
        decided.chosen, decided.asked = [], ()
        self._steps += 1
        if self._steps % REFRESH_EVERY == 0:
            self.calibration.refresh()

    def _time(self, outcome: Outcome, prefill_rows: int) -> None:
        """What the forward took. Rows of prompts cost otherwise than those that sample, and there are many of them: put
        into the table, they would tilt what it says of a few."""
        if not prefill_rows:
            self.verify.observe(outcome.rows, outcome.context, outcome.verify_ms)
            return
        decode_ms = self.verify.ms(max(1, outcome.rows - prefill_rows), outcome.context)
        expected = self.verify.ms(outcome.rows, outcome.context) - decode_ms
        self._prompts.add(expected, max(0.0, outcome.verify_ms - decode_ms))

    def _weigh(self, outcome: Outcome, decisions: Mapping[str, Sequence[str]], decided: Decided) -> None:
        """What the step's tokens took against what they would have taken one by one. A text that was read for the first
        time is an investment, which the gate has weighed: such a step says nothing."""
        n = len(decided.turns)
        if not n or decided.bound:
            return
        on = [
            turn.backlog.get(name, 0) <= SHORT_BACKLOG
            for name, asked in decisions.items()
            for turn, decision in zip(decided.turns, asked, strict=True)
            if decision == "on"
        ]
        spent_ms = outcome.verify_ms + outcome.draft_ms
        gain = sum(map(len, outcome.tokens)) / n - spent_ms / (decided.token_ms * n)
        self._balance(n).observe(gain if on and all(on) else None)

    def _balance(self, sequences: int) -> Balance:
        """That of batches of this size, within a factor of two."""
        size = max(1, sequences).bit_length()
        if size not in self._balances:
            self._balances[size] = Balance(1 << (size - 1))
        return self._balances[size]

    def _settle(self, outcome: Outcome, decided: Decided) -> None:
        """What the verified nodes of each turn promised, and what they and the free drafters' ones brought."""
        row_price = decided.row_ms / decided.token_ms
        gains = 0.0
        for i, (turn, tokens) in enumerate(zip(decided.turns, outcome.tokens, strict=True)):
            turn.control.emitted += len(tokens)
            gain = 0.0
            if i < len(decided.chosen) and decided.chosen[i][1]:
                tree, kept = decided.chosen[i]
                free = {node for node in kept if not self._free_names.isdisjoint(tree.sources[node])}
                accepted = tree.walk(tokens[:-1], set(kept))
                gain = len(free.intersection(accepted)) - row_price * len(free)
                turn.control.trust.add(sum(math.exp(tree.scores[node]) for node in kept), len(accepted))
            gains += gain
            if i < len(decided.asked):
                self._free.observe(turn, decided.asked[i], gain)
        if decided.turns and not decided.bound:
            self._free_gain += RATE_FADE * (gains / len(decided.turns) - self._free_gain)

    def _learn(
        self,
        name: str,
        work: DraftWork,
        tokens: Sequence[list[int]],
        gate: CostlyGate | None,
        decisions: Sequence[str],
        decided: Decided,
    ) -> None:
        trials: list[tuple[int, bool]] = []
        asked: list[Turn] = []
        backlog = 0
        for i, (turn, tree) in enumerate(zip(decided.turns, work.trees, strict=True)):
            if tree is None:
                continue
            asked.append(turn)
            backlog += turn.backlog.get(name, 0)
            gain = self._walk(name, turn.control, tree, tokens[i], trials) if len(tree.tokens) > 1 else 0
            if gate is not None:
                levels = max(1, max(tree.depths))
                # The last token is the target's own: where it was drafted but not verified, that brought nothing. A
                # probe asks what would have come, even of a drafter that nobody believes by now.
                if decisions and decisions[i] == "probe":
                    gate.observe(turn, gain, levels, levels, probe=True)
                else:
                    gate.observe(turn, max(0, min(gain, len(tokens[i]) - 1)), levels, _verified(decided, i, name))
        self.calibration.observe(trials)
        if gate is not None and work.levels:
            gate.observe_ms(asked, work.levels, work.ms)
            # A long text read for the first time says nothing about the price of a level.
            if backlog <= 16 * len(asked):
                gate.cost.observe(len(asked), 0, work.ms / work.levels)

    def _walk(
        self,
        name: str,
        control: SequenceControl,
        tree: TokenTree,
        tokens: Sequence[int],
        trials: list[tuple[int, bool]],
    ) -> int:
        """Follow the committed ``tokens`` down a drafter's own tree, verified or not; returns how many it held."""
        skill = control.skills.setdefault(name, Skill())
        first, deep = skill.first, skill.deep
        reached, depth = {0}, 0
        parents, depths, cells, scores, own = tree.parents, tree.depths, tree.cells, tree.scores, tree.tokens
        for node in range(1, len(own)):
            parent = parents[node]
            if parent not in reached or depths[node] > len(tokens) or cells[node] < 0:
                continue
            hit = own[node] == tokens[depths[node] - 1]
            chance = math.exp(scores[node] - scores[parent])
            trials.append((cells[node], hit))
            (deep if parent else first).add(chance, hit)
            self.reliability.add(name, chance, hit)
            if hit:
                reached.add(node)
                depth = max(depth, depths[node])
        return depth


def _verified(decided: Decided, at: int, drafter: str) -> int:
    """Nodes of a drafter that were verified, of the turn ``at``."""
    if at >= len(decided.chosen):
        return 0
    tree, kept = decided.chosen[at]
    return sum(drafter in tree.sources[node] for node in kept)


def _covered(trees: Sequence[TokenTree]) -> float:
    """Chance that one of ``trees`` holds the next token."""
    best = 0.0
    for tree in trees:
        parents, scores = tree.parents, tree.scores
        if len(parents) > 1:
            best = max(best, sum([math.exp(scores[n]) for n in range(1, len(parents)) if parents[n] == 0]))
    return min(1.0, best)
