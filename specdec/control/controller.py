"""The goodput controller: who drafts, how deep, and which nodes are verified."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from specdec.control.calibration import Calibration, Reliability, temperature_bucket
from specdec.control.costs import CostTable
from specdec.control.drafter_gate import DrafterGate, GatePrices
from specdec.control.inputs import (
    DraftRequest,
    DraftWork,
    Outcome,
    Plan,
    Ratio,
    SequenceHistory,
    SequenceInputs,
    StepInputs,
    StepPrices,
    TreeExpansion,
)
from specdec.control.learned import Learned
from specdec.control.node_budget import choose, merge
from specdec.core.tree import TokenTree

Odds = Callable[[int, int, float], tuple[float, int]]

LOOKUP = "lookup"  # names the gate of all lookup drafters
MODEL_PRIOR, LOOKUP_PRIOR = (1.5, 3.0, 3.0), (0.5, 1.0, 0.0)  # tokens, levels, rows of a step, before any was seen
LOOKS = 0.1  # over ``probe_every``: chance that in a step texts become such as a drafter does well on
REFRESH_EVERY = 12  # steps between recomputations of the calibrated chances
NEGLIGIBLE = 0.01  # of a token's time: what takes less is not decided
FADE = 0.1  # weight of one step in running averages
SPEEDUP_KEEP = 0.95  # of the speed that steps bring, from one to the next
SPEEDUP_STEPS = 4.0  # that what is expected of it at first weighs as much as
LOWEST_CHANCE = 2e-3  # nodes less likely than this are never worth a row
EXPLORES = 0.5  # of the price of a row: what may be proposed, since a node's chance is an estimate
DEAREST = 0.95  # no price, however high, stops a level whose parents are certain to be reached
OWN_KEEP = 0.9  # of what a lookup drafter's nodes did on a sequence, from one step in which it proposed to the next
FIRST_FOLLOW, FOLLOW_FADE, LEAST_FOLLOW = 0.7, 0.02, 0.2
SHORT_BACKLOG = 16  # tokens: what an accepted run or a pause leaves is read along with the first level
CHUNK = 192  # rows of a prompt read in one forward
READ_STEPS = 2.0  # plain steps' time that a step may take longer for reading
LONGEST_READ = 512  # tokens read in a step, since a request may come any time


class Controller:
    """Decides from numbers alone. In a step, `decide` is asked again with what the drafters proposed until it asks for
    no more; `observe` teaches it what came of the step, also when the next was decided already. Only `enter` and
    `observe` change it: everything else is a function of what was learnt and of the arguments, so a trace replays it.

    drafters: name -> whether it is model-based. verify: cost of the target's forward. drafting: per model-based drafter
    the cost of one level by the number of sequences drafted together. probe_every: sets how often what does not pay is
    tried again. start: what was learned of some of the drafters before.
    """

    def __init__(
        self,
        drafters: Mapping[str, bool],
        verify: CostTable,
        drafting: Mapping[str, CostTable],
        probe_every: int,
        start: Mapping[str, Learned] = MappingProxyType({}),
    ) -> None:
        self.verify = verify
        self._lookups = frozenset(name for name, model_based in drafters.items() if not model_based)
        self.calibration = Calibration(tuple(drafters), self._lookups)
        self.reliability = Reliability(drafters)
        self._drafters, self._probe_every = dict(drafters), probe_every
        looks = LOOKS / probe_every
        self._start = {name: learned for name, learned in start.items() if name in drafters}
        for name, learned in self._start.items():
            self.calibration.start(name, learned.cells)
        known = {name: self._start.get(name, Learned()) for name in drafting}
        self._models = {name: _ModelCosts(table, known[name].follow) for name, table in drafting.items()}
        self._gates = {name: DrafterGate(name, MODEL_PRIOR, looks, known[name].records()) for name in drafting}
        self._lookup_gate = DrafterGate(LOOKUP, LOOKUP_PRIOR, looks)
        self._lookup_ms = 0.0  # per sequence they are asked for
        self._lookup_gain = 0.0  # tokens that they bring a sequence and step, less what their rows cost
        self._speedup = self._first_speedup()
        self._prompts = Ratio(prior=200.0, least=0.3, most=2.0)  # milliseconds they took over those of as many rows
        self._entered = self._steps = 0

    def as_dict(self) -> dict[str, Any]:
        """What it was built from, as plain values."""
        return {
            "drafters": self._drafters,
            "verify": self.verify.as_dict(),
            "drafting": {name: costs.level.as_dict() for name, costs in self._models.items()},
            "probe_every": self._probe_every,
            "start": {name: learned.as_dict() for name, learned in self._start.items()},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Controller:
        """A fresh controller from what `as_dict` gave."""
        drafting = {name: CostTable.from_dict(table) for name, table in data["drafting"].items()}
        start = {name: Learned.from_dict(learned) for name, learned in data.get("start", {}).items()}
        return Controller(data["drafters"], CostTable.from_dict(data["verify"]), drafting, data["probe_every"], start)

    def learned(self) -> dict[str, Learned]:
        """What is known by now of each drafter that proposed anything."""
        found = {}
        for name in self._drafters:
            cells, gate, costs = self.calibration.counts(name), self._gates.get(name), self._models.get(name)
            pools = [(b, r.steps, r.tokens, r.levels, r.rows) for b, r in gate.pools.items()] if gate else []
            if cells:
                found[name] = Learned(cells, pools, costs.follow if costs else None)
        return found

    def enter(self, temperature: float) -> SequenceHistory:
        """A sequence begins."""
        self._entered += 1
        return self.history(self._entered, temperature_bucket(temperature))

    def history(self, key: int, bucket: int) -> SequenceHistory:
        """That of a sequence that begins; `enter` numbers them."""
        return SequenceHistory(key, bucket)

    def prices(self, contexts: Sequence[float], prefill_rows: int = 0) -> StepPrices:
        """What a step costs in which sequences sample that look back on ``contexts``, and ``prefill_rows`` rows of
        prompts are computed besides."""
        n = len(contexts)
        context = sum(contexts) / n if n else 0.0
        rows = n + prefill_rows
        decode_ms = self.verify.ms(max(n, 1), context)
        all_ms = self.verify.ms(max(rows, 1), context) if prefill_rows else decode_ms
        row_ms = (self.verify.ms(rows + 8, context) - all_ms) / 8
        # A prompt that is read beside them makes this step long; the time of those that decode is worth no less.
        plain_ms = decode_ms + self._prompts.value * (all_ms - decode_ms)
        return StepPrices(plain_ms, decode_ms, row_ms, decode_ms / max(n, 1), rows, context)

    def rate(self, step: StepInputs) -> float:
        """Tokens per millisecond that this batch is expected to earn by decoding; plainly, if drafting loses."""
        return self._speedup.value / step.prices.token_ms

    def decide(self, step: StepInputs) -> Plan:
        """What to do next: whom to ask, or else which nodes to verify."""
        if self._lookups and not self._lookups.issubset(step.drafted):
            return Plan(self._ask_lookups(step))
        for name in self._gates:
            if name not in step.drafted:
                return Plan([self._ask_model(name, step)])
        return self._choose(step)

    def odds(self, drafter: str, one: SequenceInputs) -> Odds:
        """How likely ``drafter``'s nodes are accepted on this sequence: (rank, depth, prob) -> (log chance, cell). A
        lookup drafter copies, and whether a text goes on as copied is the text's: its chances, of all sequences, are
        multiplied by how they held on this one."""
        bucket, cell_of, chance_of, log = one.history.bucket, self.calibration.cell, self.calibration.chance, math.log
        own = one.history.rates.get(drafter)
        times = own.value if own else 1.0

        def odds(rank: int, depth: int, prob: float) -> tuple[float, int]:
            cell = cell_of(drafter, bucket, rank, depth, prob)
            return log(times * chance_of(cell)), cell

        return odds

    def draft_ms(self, drafter: str, batch: int, levels: int) -> float:
        """Expected milliseconds of ``levels`` forwards of a model-based drafter for ``batch`` sequences."""
        costs = self._models.get(drafter)
        return levels * costs.level.ms(batch) if costs and batch else 0.0

    def observe(self, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        """Learn from what ``step`` yielded, in which ``plan`` was the last."""
        self._observe_times(step, outcome)
        gained = 0.0
        row_price = step.prices.row_ms / step.prices.token_ms
        asked = self._lookups_asked(step)
        weighed = self._weighs_lookups(step)
        for one, tree, kept, tokens, was_asked in zip(
            step.sequences, plan.trees, plan.kept, outcome.tokens, asked, strict=True
        ):
            one.history.emitted += len(tokens)
            gain = 0.0
            if kept:
                own = {node for node in kept if not self._lookups.isdisjoint(tree.sources[node])}
                gain = len(own.intersection(tree.follow(tokens[:-1], set(kept)))) - row_price * len(own)
            gained += gain
            if weighed and was_asked:
                self._lookup_gate.observe(one, max(0.0, gain), 1.0, 0.0)
        if weighed:
            self._lookup_gate.pause(step.sequences, asked)
        for name, work in step.drafted.items():
            self._observe_drafter(name, work, step, plan, outcome)
        if step.sequences and not step.bound:
            self._lookup_gain += FADE * (gained / len(step.sequences) - self._lookup_gain)
            self._observe_speedup(step, plan, outcome)
        self._steps += 1
        if self._steps % REFRESH_EVERY == 0:
            self.calibration.refresh()

    def _first_speedup(self) -> Ratio:
        """Tokens a plain step's time brings, as a running ratio: at first what the best draft model is expected to."""
        best, plain_ms = 1.0, self.verify.ms(1)
        row_ms = (self.verify.ms(9) - plain_ms) / 8
        for name, gate in self._gates.items():
            known, level = gate.known(0), self._models[name].level
            if level.known:
                drafting = (known.levels * level.ms(1) + known.rows * row_ms) / plain_ms
                best = max(best, (known.steps + known.tokens) / (known.steps + drafting))
        return Ratio(0.0, 1.0, math.inf, SPEEDUP_KEEP, SPEEDUP_STEPS * best, SPEEDUP_STEPS)

    def _observe_speedup(self, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        """All tokens over all time, not a mean of steps: what a step's last level must earn is what others do. Reading
        a long text is left out, which no later step does again."""
        spent_ms = plan.verify_ms + self._lookup_ms * sum(self._lookups_asked(step))
        for name, work in step.drafted.items():
            spent_ms += self.draft_ms(name, len(work.trees) - work.trees.count(None), work.levels)
        self._speedup.add(spent_ms / step.prices.decode_ms, sum(map(len, outcome.tokens)) / len(step.sequences))

    def _weighs_lookups(self, step: StepInputs) -> bool:
        """Whether asking lookup drafters takes long enough to be weighed against what they bring."""
        return self._lookup_ms > NEGLIGIBLE * step.prices.token_ms

    def _lookups_asked(self, step: StepInputs) -> list[bool]:
        works = [step.drafted[name].trees for name in step.drafted if name in self._lookups]
        return [any(trees[i] is not None for trees in works) for i in range(len(step.sequences))]

    def _ask_lookups(self, step: StepInputs) -> list[DraftRequest]:
        """They share one decision: the time all of them take is what is known."""
        sequences, n = step.sequences, len(step.sequences)
        wanted = [True] * n
        if self._weighs_lookups(step):
            prices = GatePrices(step.prices.token_ms, 0.0, [self._lookup_ms * count for count in range(n + 1)])
            found = self._lookup_gate.decide(sequences, wanted, [0.0] * n, [0.0] * n, prices)
            wanted = [one.first or decision != "off" for one, decision in zip(sequences, found, strict=True)]
        floors = {"free": self._node_floor(step)}
        return [
            DraftRequest(
                name, [_lookup_decision(name, one, ok) for one, ok in zip(sequences, wanted, strict=True)], floors
            )
            for name in self._drafters
            if name in self._lookups
        ]

    def _ask_model(self, name: str, step: StepInputs) -> DraftRequest:
        costs, prices = self._models[name], step.prices
        eligible = [name in one.drafters and one.nodes > 0 and (one.forced or not one.first) for one in step.sequences]
        if not any(eligible):
            return DraftRequest(name, [""] * len(eligible), {})
        covered = [_covered(step, i) for i in range(len(eligible))]
        reading = [costs.reading_ms(one.backlog.get(name, 0)) for one in step.sequences]
        token_ms = prices.token_ms / (1.0 + max(0.0, self._lookup_gain))
        levels = costs.levels(eligible.count(True), self.verify.slowness)
        gate_prices = GatePrices(token_ms, prices.row_ms, levels, costs.reading_ms(round(costs.unread)))
        decisions = self._gates[name].decide(step.sequences, eligible, covered, reading, gate_prices)
        reads = self._pieces(name, decisions, step)
        floor = self._node_floor(step)
        ask = DraftRequest(name, decisions, {"on": floor, "probe": -math.inf, "forced": -math.inf}, reads=reads)
        if ask.asked:
            rate = self.rate(step)
            nodes = sum([one.nodes for one, ok in zip(step.sequences, decisions, strict=True) if ok in ask.floors])
            verify = self.verify.span(min(prices.rows, self.verify.largest), nodes, prices.context)
            ask.deepening = costs.deepening(ask.asked, rate, verify, prices.row_ms)
        return ask

    def _pieces(self, name: str, decisions: list[str], step: StepInputs) -> dict[int, int]:
        """Who reads only a piece of what it has not seen, by place the tokens, since all would hold up the others that
        wait for this step. Changes their ``decisions``."""
        backlogs = [one.backlog.get(name, 0) for one in step.sequences]
        long = [i for i, n in enumerate(backlogs) if n > SHORT_BACKLOG and decisions[i] not in ("", "off")]
        pieces: dict[int, int] = {}
        left, others = LONGEST_READ, len(step.sequences) > 1 or (step.prefill_rows and not step.sequences[0].first)
        if others and "forced" not in decisions:
            left = self._models[name].rows_within(READ_STEPS * step.prices.plain_ms)
        for i in sorted(long, key=backlogs.__getitem__):
            if backlogs[i] > left:
                decisions[i] = "read" if left else "off"
                pieces |= {i: left} if left else {}
            left = max(0, left - backlogs[i])
        return pieces

    def _node_floor(self, step: StepInputs) -> float:
        """Log of the least chance of being reached for which a node is worth proposing; now and then none, since a
        chance that fell too low could never be corrected."""
        if self._steps % self._probe_every == 0:
            return -math.inf
        return math.log(max(LOWEST_CHANCE, EXPLORES * self.rate(step) * step.prices.row_ms))

    def _choose(self, step: StepInputs) -> Plan:
        works = list(step.drafted.values())
        trees = [
            merge([TokenTree(one.pending), *(tree for work in works if (tree := work.trees[i]) is not None)])
            for i, one in enumerate(step.sequences)
        ]
        proposed = sum([len(tree.tokens) - 1 for tree in trees])
        draft_ms = sum([work.ms for work in works])
        prices = step.prices
        if not proposed:
            n = len(trees)
            value = n / max(draft_ms + prices.decode_ms, 1e-9)
            return Plan([], trees, [[] for _ in trees], 0, float(n), value, prices.plain_ms)
        costs = self.verify.span(min(prices.rows, self.verify.largest), proposed, prices.context)
        prompts_ms = max(0.0, costs[0] - prices.decode_ms)
        choice = choose(step.sequences, trees, costs, draft_ms, self.rate(step), prompts_ms)
        verify_ms = prices.plain_ms + costs[min(choice.budget, len(costs) - 1)] - costs[0]
        return Plan([], trees, choice.kept, choice.candidates, choice.predicted_tokens, choice.value, verify_ms)

    def _observe_times(self, step: StepInputs, outcome: Outcome) -> None:
        """What forward and drafting took. Rows of prompts cost otherwise than those that sample, and there are many of
        them: put into the table, they would tilt what it says of a few."""
        if step.prefill_rows:
            decode_ms = self.verify.ms(max(1, outcome.rows - step.prefill_rows), outcome.context)
            expected = self.verify.ms(outcome.rows, outcome.context) - decode_ms
            self._prompts.add(expected, max(0.0, outcome.verify_ms - decode_ms))
        else:
            self.verify.observe(outcome.rows, outcome.context, outcome.verify_ms)
        left_ms = outcome.draft_ms
        lookups = sum(self._lookups_asked(step))
        worked = {name: step.drafted[name] for name in self._models if name in step.drafted}
        asked = [name for name, work in worked.items() if work.levels or work.reads]
        if not asked:
            if lookups:
                self._lookup_ms += FADE * (left_ms / lookups - self._lookup_ms)
            return
        left_ms -= self._lookup_ms * lookups
        drafted_ms = sum(worked[name].ms for name in asked)
        for name in asked:
            work = worked[name]
            backlogs = [
                one.backlog.get(name, 0)
                for one, tree in zip(step.sequences, work.trees, strict=True)
                if tree is not None
            ]
            read = sum(backlogs) + work.reads
            # All that the propose stage took besides is put down to who made it long.
            took = work.ms * max(1.0, left_ms / max(drafted_ms, 1e-9))
            self._models[name].observe(len(backlogs), work.levels, read, work.ms, took, self.verify.slowness)

    def _observe_drafter(self, name: str, work: DraftWork, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        trials: list[tuple[int, bool]] = []
        gate = self._gates.get(name)
        for i, (one, tree) in enumerate(zip(step.sequences, work.trees, strict=True)):
            if gate is not None and name not in one.history.asked and work.decisions[i] not in ("", "off"):
                one.history.asked.add(name)
                self._models[name].observe_unread(one.backlog.get(name, 0))
            if tree is None:
                continue
            seen = len(trials)
            held = self._observe_tree(name, tree, outcome.tokens[i], trials) if len(tree.tokens) > 1 else 0
            if gate is None:
                self._observe_own(name, one.history, trials[seen:])
                continue
            levels = max(1, max(tree.depths))
            self._models[name].observe_follow(held, levels)
            # The last token is the target's own: where it was drafted but not verified, that brought nothing. A probe
            # asks what would have come, even of a drafter that nobody believes by now; rows that somebody else wished
            # for are none that the drafter would have cost.
            if work.decisions[i] in ("probe", "forced"):
                gate.observe(one, held, levels, levels)
            else:
                verified = sum(name in plan.trees[i].sources[node] for node in plan.kept[i])
                gate.observe(one, max(0, min(held, len(outcome.tokens[i]) - 1)), levels, verified)
        if gate is not None:
            gate.pause(step.sequences, [tree is not None for tree in work.trees])
        self.calibration.observe(trials)

    def _observe_own(self, name: str, history: SequenceHistory, trials: Sequence[tuple[int, bool]]) -> None:
        """What a lookup drafter's nodes did on one sequence, beside what they do on all of them."""
        if trials:
            chance_of = self.calibration.chance
            # At most 1: what is learnt of many sequences is sure of the best.
            rate = history.rates.setdefault(name, Ratio(prior=1.0, least=0.0, most=1.0, keep=OWN_KEEP))
            rate.add(sum([chance_of(cell) for cell, _ in trials]), sum([hit for _, hit in trials]))

    def _observe_tree(self, name: str, tree: TokenTree, tokens: Sequence[int], trials: list[tuple[int, bool]]) -> int:
        """Follow the committed ``tokens`` down a drafter's own tree, verified or not; returns how many it held."""
        reached, depth = {0}, 0
        parents, depths, cells, scores, own = tree.parents, tree.depths, tree.cells, tree.scores, tree.tokens
        for node in range(1, len(own)):
            parent = parents[node]
            if parent not in reached or depths[node] > len(tokens) or cells[node] < 0:
                continue
            hit = own[node] == tokens[depths[node] - 1]
            trials.append((cells[node], hit))
            self.reliability.add(name, math.exp(scores[node] - scores[parent]), hit)
            if hit:
                reached.add(node)
                depth = max(depth, depths[node])
        return depth


class _ModelCosts:
    """What asking a model-based drafter costs. level: measured, by sequences. follow: share of reached nodes below
    which it holds the target's choice."""

    def __init__(self, level: CostTable, follow: float | None = None) -> None:
        self.level = level
        # What askings take over what their levels and long texts should: texts of several tokens ride along as well.
        self._overhead = Ratio(prior=200.0, least=1.0, most=100.0)
        self._reading = Ratio(prior=100.0, least=0.2, most=4.0)  # milliseconds that long texts took, over those of rows
        self._slowness_then = 1.0  # of the target's forwards when it was asked last
        self.unread = 0.0  # tokens that a sequence holds when it is asked for first
        self.follow = FIRST_FOLLOW if follow is None else follow

    def levels(self, most: int, slowness: float) -> list[float]:
        """Milliseconds of a level by sequences, from none to ``most``. slowness: of the target's forwards, since a
        drafter that was not asked has got as slow as its machine."""
        if not self.level.known:
            return [0.0] * (most + 1)  # asking is the way to learn what it costs
        times = self._overhead.value * max(0.5, min(2.0, slowness / self._slowness_then))
        found = [times * ms for ms in self.level.span(1, most - 1)]
        return [0.0, *found, *(found[-1:] * (most - len(found)))]  # beyond what was measured none gets dearer

    def reading_ms(self, backlog: int) -> float:
        """What reading what it has not seen costs beyond an ordinary first level."""
        if backlog <= SHORT_BACKLOG or not self.level.known:
            return 0.0
        rows_ms = self.level.ms(min(backlog, CHUNK)) * max(1.0, backlog / CHUNK) - self.level.ms(1)
        return rows_ms * self._reading.value

    def rows_within(self, ms: float) -> int:
        """Tokens of one forward that takes so long, or a few, since none would never end."""
        if not self.level.known:
            return CHUNK
        return max(SHORT_BACKLOG, bisect_right(self.level.span(1, CHUNK - 1), ms))

    def deepening(self, batch: int, rate: float, verify: Sequence[float], row_ms: float) -> TreeExpansion:
        """How deep to go in this step, ``batch`` sequences together."""
        follow = max(LEAST_FOLLOW, self.follow)
        if not self.level.known:
            return TreeExpansion(None, rate, verify, follow)
        price = rate * (self.level.ms(batch) / batch + row_ms) / follow
        return TreeExpansion(self.level, rate, verify, follow, math.log(min(DEAREST, max(price, 1e-3))))

    def observe(self, batch: int, levels: int, backlog: int, ms: float, took: float, slowness: float) -> None:
        """``batch`` sequences were asked together, ``levels`` forwards in ``ms``, ``took`` with all that belongs to
        it, after reading ``backlog`` tokens."""
        if self.level.known:
            expected, reading_ms = (
                levels * self.level.ms(batch) if levels else self.level.ms(1),
                self.reading_ms(backlog),
            )
            self._overhead.add(expected + reading_ms, took)
            if reading_ms:
                self._reading.add(reading_ms / self._reading.value, max(0.0, ms - expected))
            self._slowness_then += 0.15 * (slowness - self._slowness_then)
        # A long text read for the first time says nothing about the price of a level.
        if levels and backlog <= SHORT_BACKLOG * batch:
            self.level.observe(batch, 0, ms / levels)

    def observe_unread(self, tokens: int) -> None:
        """A sequence is drafted for from now on, which held so many tokens."""
        self.unread += FADE * (tokens - self.unread) if self.unread else tokens

    def observe_follow(self, held: int, levels: int) -> None:
        """Of so many levels a tree ``held`` the target's choice."""
        tried = min(held + 1, levels)  # levels whose parent was reached
        self.follow += FOLLOW_FADE * (held - self.follow * tried)


def _lookup_decision(name: str, one: SequenceInputs, wanted: bool) -> str:
    if name not in one.drafters or one.nodes <= 0:
        return ""
    return "free" if wanted or one.forced else "off"


def _covered(step: StepInputs, at: int) -> float:
    """Chance that one of the trees proposed so far for a sequence holds its next token."""
    best = 0.0
    for work in step.drafted.values():
        tree = work.trees[at]
        if tree is not None and len(tree.parents) > 1:
            parents, scores = tree.parents, tree.scores
            best = max(best, sum([math.exp(scores[n]) for n in range(1, len(parents)) if parents[n] == 0]))
    return min(1.0, best)
