"""Everything that the controller learns, and how each step's outcome updates it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from specdec.control.estimates.acceptance import Calibration
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.drafters import DraftCosts, DrafterYield
from specdec.control.estimates.learned import Learned
from specdec.control.inputs import (
    DraftDecision,
    DraftWork,
    Match,
    Outcome,
    Plan,
    Ratio,
    SequenceHistory,
    StepInputs,
    StepPrices,
)
from specdec.control.params import DEFAULT_PARAMS, ControlParams
from specdec.core.tree import TokenTree


class Estimates:
    """Everything that the controller learns from steps. Only `observe` changes it.

    drafters: name -> whether it is model-based. verify: cost of the target's forward. drafting: per model-based drafter
    the cost of a forward by its rows, one per sequence drafted together. start: estimates of an earlier run. tree_rows:
    of drafters that grow a tree in one forward, the rows of a sequence with one new token.
    """

    def __init__(
        self,
        drafters: Mapping[str, bool],
        verify: CostTable,
        drafting: Mapping[str, CostTable],
        start: Mapping[str, Learned] = MappingProxyType({}),
        params: ControlParams = DEFAULT_PARAMS,
        tree_rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.drafters, self.verify, self.params = dict(drafters), verify, params
        self.lookups = frozenset(name for name, model_based in drafters.items() if not model_based)
        self.calibration = Calibration(tuple(drafters), params)
        self.start = {name: learned for name, learned in start.items() if name in drafters}
        for name, learned in self.start.items():
            self.calibration.start(name, learned.cells)
        known = {name: self.start.get(name, Learned()) for name in drafting}
        self.costs = {
            name: DraftCosts(table, known[name].agreement, params, tree_rows.get(name, 0))
            for name, table in drafting.items()
        }
        tokens, levels, rows = params.model_prior
        priors = {name: (tokens, 1.0 if tree_rows.get(name) else levels, rows) for name in drafting}
        self.yields = {name: DrafterYield(name, priors[name], known[name].records(), params) for name in drafting}
        # Of all lookup drafters together
        self.lookup_yield = DrafterYield("lookup", params.lookup_prior, params=params)
        self.lookup_step_ms = self.lookup_ms = 0.0  # of a step in which they propose, and of each sequence with one
        self.lookup_gain = 0.0  # tokens per sequence and step, less the price of their rows
        self.least_match = Match.WEAK  # the weakest that they draft after; first tokens and mode ON take any
        self.speedup = self._first_speedup()  # tokens that a plain step's time brings
        # Milliseconds of prompts in a forward over those of as many sampling rows.
        self.prompt_cost = Ratio(params.prompt_cost_prior_ms, params.prompt_cost_bounds, params.ratio_retention)
        self.steps = 0

    def prices(self, contexts: Sequence[float], prefill_rows: int = 0) -> StepPrices:
        """Costs of a step whose sampling sequences attend to ``contexts`` tokens, with ``prefill_rows`` prompt rows."""
        n = len(contexts)
        context = sum(contexts) / n
        rows = n + prefill_rows
        decode_ms, all_ms = self.verify.ms(n, context), self.verify.ms(rows, context)
        row_ms = self.verify.row_ms(rows, context)
        # A prompt in the step makes it longer, but the time of decoding sequences keeps its value.
        plain_ms = decode_ms + self.prompt_cost.value * (all_ms - decode_ms)
        return StepPrices(plain_ms, decode_ms, row_ms, decode_ms / n, rows, context)

    def rate(self, step: StepInputs) -> float:
        """Tokens per millisecond that this batch is expected to earn; that of plain decoding if drafting loses."""
        return self.speedup.value / step.prices.token_ms

    def draft_ms(self, drafter: str, batch: int, levels: int) -> float:
        """Expected milliseconds of ``levels`` forwards of a model-based drafter for ``batch`` sequences."""
        costs = self.costs.get(drafter)
        return levels * costs.forward_ms(batch) if costs else 0.0

    def weighs_lookups(self, step: StepInputs) -> bool:
        """Whether lookup drafters take long enough for their cost to matter."""
        return self.lookups_ms(1) > self.params.min_weighed_share * step.prices.token_ms

    def lookups_ms(self, proposals: int) -> float:
        """Milliseconds, beside its forward, of a step in which lookup drafters propose for so many sequences."""
        return self.lookup_step_ms + self.lookup_ms * proposals if proposals else 0.0

    def lookups_proposed(self, step: StepInputs) -> list[bool]:
        """Per sequence, whether a lookup drafter proposed in this step."""
        works = [step.drafted[name].trees for name in step.drafted if name in self.lookups]
        return [any(trees[i] is not None for trees in works) for i in range(len(step.sequences))]

    def learned(self) -> dict[str, Learned]:
        """Estimates of each drafter with observations."""
        found = {}
        for name in self.drafters:
            cells, yields, costs = self.calibration.counts(name), self.yields.get(name), self.costs.get(name)
            pools = [(b, r.steps, r.tokens, r.levels, r.rows) for b, r in yields.pools.items()] if yields else []
            if cells:
                found[name] = Learned(cells, pools, costs.agreement if costs else None)
        return found

    def _first_speedup(self) -> Ratio:
        """The speed-up ratio, starting at that of the best draft model by its prior or earlier records."""
        best, plain_ms, row_ms = 1.0, self.verify.ms(1), self.verify.row_ms(1)
        for name, yields in self.yields.items():
            known, costs = yields.pool(0), self.costs[name]
            if costs.level.known:
                drafting = (known.levels * costs.forward_ms(1) + known.rows * row_ms) / plain_ms
                best = max(best, (known.steps + known.tokens) / (known.steps + drafting))
        steps = self.params.speedup_prior_steps
        return Ratio(0.0, (1.0, math.inf), self.params.speedup_retention, steps * best, steps)

    def observe(self, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        """Update all estimates from the outcome of ``step``, whose last plan was ``plan``."""
        params = self.params
        proposed = self.lookups_proposed(step)
        lookups = sum(proposed)
        self._observe_times(step, outcome, lookups)
        gained = 0.0
        row_price = step.prices.row_ms / step.prices.token_ms
        weighed = self.weighs_lookups(step)
        for one, tree, kept, tokens, did in zip(
            step.sequences, plan.trees, plan.kept, outcome.tokens, proposed, strict=True
        ):
            own = {node for node in kept if not self.lookups.isdisjoint(tree.sources[node])}
            gain = len(own.intersection(tree.follow(tokens[:-1]))) - row_price * len(own)
            gained += gain
            if weighed and did:
                self.lookup_yield.observe(one, max(0.0, gain), 1.0, 0.0)
        if weighed:
            self.lookup_yield.end_step(step.sequences, proposed, 1 + step.rested)
        costly = self.lookups_ms(1) > params.max_weak_share * step.prices.token_ms
        self.least_match = Match.STRONG if costly else Match.WEAK
        for name, work in step.drafted.items():
            self._observe_drafter(name, work, step, plan, outcome)
        if not step.constrained:
            self.lookup_gain += params.average_weight * (gained / len(step.sequences) - self.lookup_gain)
            self._observe_speedup(step, plan, outcome, self.lookups_ms(lookups))
        self.steps += 1
        if self.steps % params.refresh_steps == 0:
            self.calibration.refresh()

    def _observe_speedup(self, step: StepInputs, plan: Plan, outcome: Outcome, lookups_ms: float) -> None:
        """All tokens over all time, not a mean of steps, since that is what a step's last level competes with.

        Long prefill is left out: no later step repeats it. A step without a decision brings one token.
        """
        spent_ms = plan.verify_ms + lookups_ms
        for name, work in step.drafted.items():
            spent_ms += self.draft_ms(name, len(work.trees) - work.trees.count(None), work.levels)
        tokens = sum(map(len, outcome.tokens)) / len(step.sequences)
        rested = min(step.rested, round(1.0 / (1.0 - self.params.speedup_retention)))  # older steps are forgotten
        self.speedup.add(spent_ms / step.prices.decode_ms + rested, tokens + rested)

    def _observe_times(self, step: StepInputs, outcome: Outcome, lookups: int) -> None:
        """Update costs from the times of the forward and of drafting.

        Prompt rows have a ratio of their own: they cost less than sampling rows, and there are many of them. A level
        that the step does not measure changes as the target's forward does.
        """
        before = self.verify.slowdown
        if not step.prefill_rows:
            self.verify.observe(outcome.rows, outcome.context, outcome.verify_ms)
        elif outcome.verify_ms > 0.0:  # it was measured
            decode_ms = self.verify.ms(outcome.rows - step.prefill_rows, outcome.context)
            expected = self.verify.ms(outcome.rows, outcome.context) - decode_ms
            self.prompt_cost.add(expected, max(0.0, outcome.verify_ms - decode_ms))
        left_ms = outcome.draft_ms
        worked = {
            name: work
            for name in self.costs
            if (work := step.drafted.get(name)) is not None and (work.levels or work.prefilled)
        }
        if worked:
            left_ms -= self.lookups_ms(lookups)
        elif lookups:
            proposals_ms = sum(work.ms for name, work in step.drafted.items() if name in self.lookups)
            self.lookup_step_ms = self._averaged(self.lookup_step_ms, max(0.0, left_ms - proposals_ms))
            self.lookup_ms = self._averaged(self.lookup_ms, proposals_ms / lookups)
        measured: set[str] = set()
        drafted_ms = sum(work.ms for work in worked.values())
        for name, work in worked.items():
            pending = [tokens for tokens, tree in zip(work.pending, work.trees, strict=True) if tree is not None]
            prefilled = sum(pending) + work.prefilled
            # The rest of the propose stage is attributed to model-based drafters by their share of its time.
            took = work.ms * max(1.0, left_ms / max(drafted_ms, 1e-9))
            if self.costs[name].observe(len(pending), work.levels, prefilled, work.ms, took):
                measured.add(name)
        for name in self.costs.keys() - measured:
            self.costs[name].level.follow(before, self.verify.slowdown)

    def _averaged(self, average: float, ms: float) -> float:
        """The running average with a new time; a far longer one is another process on the machine."""
        params = self.params
        bounded = min(ms, params.max_lookup_surprise * average) if average else ms
        return average + params.average_weight * (bounded - average)

    def _observe_drafter(self, name: str, work: DraftWork, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        trials: list[tuple[int, bool]] = []
        yields = self.yields.get(name)
        for i, (one, tree) in enumerate(zip(step.sequences, work.trees, strict=True)):
            if tree is None:
                continue
            seen = len(trials)
            held = self._observe_tree(tree, outcome.tokens[i], trials) if len(tree.tokens) > 1 else 0
            if yields is None:
                self._observe_sequence_rate(name, one.history, trials[seen:])
                continue
            depth = max(1, max(tree.depths))
            forwards = min(depth, max(1, work.levels))  # a drafter that could not begin is asked less often too
            self.costs[name].observe_agreement(held, depth if work.levels else 0)
            # A probe measures the drafter's own tree, whatever was verified. Otherwise only verified nodes bring
            # tokens: the last token is the target's own, also if an unverified node held it.
            if work.decisions[i] in (DraftDecision.PROBE, DraftDecision.FORCED):
                yields.observe(one, held, forwards, depth)
            else:
                verified = sum(name in plan.trees[i].sources[node] for node in plan.kept[i])
                yields.observe(one, max(0, min(held, len(outcome.tokens[i]) - 1)), forwards, verified)
        if yields is not None:
            yields.end_step(step.sequences, [tree is not None for tree in work.trees], 1 + step.rested)
        self.calibration.observe(trials)

    def _observe_sequence_rate(self, name: str, history: SequenceHistory, trials: Sequence[tuple[int, bool]]) -> None:
        """Update a lookup drafter's acceptance ratio on one sequence."""
        if trials:
            rate_of, retention = self.calibration.rate, self.params.sequence_rate_retention
            # At most 1: the rates over all sequences are the more certain ones.
            rate = history.rates.setdefault(name, Ratio(1.0, (0.0, 1.0), retention))
            rate.add(sum([rate_of(cell) for cell, _ in trials]), sum([hit for _, hit in trials]))

    def _observe_tree(self, tree: TokenTree, tokens: Sequence[int], trials: list[tuple[int, bool]]) -> int:
        """Append the trials of a drafter's own tree, verified or not; returns the depth to which it held ``tokens``."""
        reached, depth = {0}, 0
        parents, depths, cells, own = tree.parents, tree.depths, tree.cells, tree.tokens
        for node in range(1, len(own)):
            parent = parents[node]
            if parent not in reached or depths[node] > len(tokens) or cells[node] < 0:
                continue
            hit = own[node] == tokens[depths[node] - 1]
            trials.append((cells[node], hit))
            if hit:
                reached.add(node)
                depth = max(depth, depths[node])
        return depth
