"""The goodput controller: policies applied to estimates, one decision per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdec.control.estimates.acceptance import temperature_bucket
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.drafters import DraftCosts
from specdec.control.estimates.learned import Learned
from specdec.control.inputs import (
    DraftDecision,
    DraftRequest,
    Odds,
    Outcome,
    Plan,
    SequenceHistory,
    SequenceInputs,
    StepInputs,
    TreeExpansion,
)
from specdec.control.learning import Estimates
from specdec.control.params import ControlParams
from specdec.control.policies.how_deep import expansion_floor
from specdec.control.policies.which_nodes import choose, merge
from specdec.control.policies.who_drafts import DraftPrices, choose_sequences, reads_end_alone, split_prefill
from specdec.core.tree import TokenTree


class Controller:
    """Decides each step from numbers alone; a trace replays it.

    `decide` is called again with the drafters' results until it requests no more. `observe` learns from the step's
    outcome, possibly after the next step is decided. `enter` and `observe` are the only calls that change state.
    """

    def __init__(self, estimates: Estimates) -> None:
        self.estimates = estimates
        self._entered = 0

    def as_dict(self) -> dict[str, Any]:
        """The arguments that its estimates were built from, as plain values."""
        known = self.estimates
        return {
            "drafters": known.drafters,
            "verify": known.verify.as_dict(),
            "drafting": {name: costs.level.as_dict() for name, costs in known.costs.items()},
            "start": {name: learned.as_dict() for name, learned in known.start.items()},
            "params": asdict(known.params),
            "tree_rows": {name: costs.tree_rows for name, costs in known.costs.items() if costs.tree_rows},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Controller:
        """A fresh controller from the values of `as_dict`."""
        params = ControlParams.from_dict(data["params"])
        drafting = {name: CostTable.from_dict(table, params) for name, table in data["drafting"].items()}
        start = {name: Learned.from_dict(learned) for name, learned in data.get("start", {}).items()}
        verify = CostTable.from_dict(data["verify"], params)
        return Controller(Estimates(data["drafters"], verify, drafting, start, params, data.get("tree_rows", {})))

    def enter(self, temperature: float) -> SequenceHistory:
        """The history of a sequence that begins."""
        self._entered += 1
        return SequenceHistory(self._entered, temperature_bucket(temperature))

    def decide(self, step: StepInputs) -> Plan:
        """The drafters to run next, or else the nodes to verify."""
        known = self.estimates
        if known.lookups and not known.lookups.issubset(step.drafted):
            return Plan(self._request_lookups(step))
        for name in known.yields:
            if name not in step.drafted:
                return Plan([self._request_model(name, step)])
        return _choose_nodes(known, step)

    def odds(self, drafter: str, one: SequenceInputs) -> Odds:
        """The calibrated chances of ``drafter`` on a sequence.

        A lookup drafter copies text, and how well that works depends on the text. Its chances over all sequences are
        multiplied by its acceptance ratio on this one.
        """
        calibration = self.estimates.calibration
        bucket, cell_of, chance_of, log = one.history.bucket, calibration.cell, calibration.chance, math.log
        own = one.history.rates.get(drafter)
        times = own.value if own else 1.0

        def odds(rank: int, depth: int, prob: float) -> tuple[float, int]:
            cell = cell_of(drafter, bucket, rank, depth, prob)
            return log(times * chance_of(cell, prob)), cell

        return odds

    def observe(self, step: StepInputs, plan: Plan, outcome: Outcome) -> None:
        """Learn from the outcome of ``step``, whose last plan was ``plan``."""
        self.estimates.observe(step, plan, outcome)

    def _request_lookups(self, step: StepInputs) -> list[DraftRequest]:
        """One decision for all lookup drafters, since only their total time is measured."""
        known, sequences, n = self.estimates, step.sequences, len(step.sequences)
        wanted = [True] * n
        if known.weighs_lookups(step):
            prices = DraftPrices(step.prices.token_ms, 0.0, [known.lookups_ms(count) for count in range(n + 1)])
            matched = [not (one.first or known.lookups.isdisjoint(one.drafters)) for one in sequences]
            found = choose_sequences(known.lookup_yield, sequences, matched, [0.0] * n, [0.0] * n, prices)
            wanted = [made is not DraftDecision.OFF for made in found]
        requests = []
        for name in known.drafters:
            if name in known.lookups:
                decisions = [_lookup_decision(name, one, ok) for one, ok in zip(sequences, wanted, strict=True)]
                requests.append(DraftRequest(name, decisions, _node_floors(known, step, decisions), pending=[0] * n))
        return requests

    def _request_model(self, name: str, step: StepInputs) -> DraftRequest:
        known, costs, prices = self.estimates, self.estimates.costs[name], step.prices
        eligible = [name in one.drafters and one.nodes > 0 and (one.forced or not one.first) for one in step.sequences]
        if not any(eligible):
            n = len(eligible)
            return DraftRequest(name, [DraftDecision.INELIGIBLE] * n, [None] * n, pending=[0] * n)
        covered = [_covered(step, i) for i in range(len(eligible))]
        token_ms = prices.token_ms / (1.0 + max(0.0, known.lookup_gain))
        pending = [self._pending(name, one, token_ms) for one in step.sequences]
        prefill_ms = [costs.prefill_ms(tokens) for tokens in pending]
        levels = costs.levels(eligible.count(True))
        draft_prices = DraftPrices(token_ms, prices.row_ms, levels)
        decisions = choose_sequences(known.yields[name], step.sequences, eligible, covered, prefill_ms, draft_prices)
        prefill = split_prefill(decisions, pending, self._prefill_limit(costs, decisions, step), known.params)
        floors = _node_floors(known, step, decisions)
        request = DraftRequest(name, decisions, floors, prefill=prefill, pending=pending)
        if request.proposing:
            request.expansion = self._expansion(costs, request, step)
        return request

    def _pending(self, name: str, one: SequenceInputs, token_ms: float) -> int:
        """Tokens that the drafter must compute, of the whole text or of its end. token_ms: a token without it."""
        whole, tail = one.pending_prefill.get(name, (0, 0))
        if tail < whole and not one.forced:
            costs = self.estimates.costs[name]
            saved_ms = costs.prefill_ms(whole) - costs.prefill_ms(tail)
            if reads_end_alone(self.estimates.yields[name], one, saved_ms, token_ms):
                return tail
        return whole

    def _expansion(self, costs: DraftCosts, request: DraftRequest, step: StepInputs) -> TreeExpansion:
        known, prices, batch, rate = self.estimates, step.prices, request.proposing, self.estimates.rate(step)
        nodes = sum([one.nodes for one, floor in zip(step.sequences, request.floors, strict=True)
                     if floor is not None])  # fmt: skip
        verify = known.verify.span(min(prices.rows, known.verify.largest), nodes, prices.context)
        agreement = max(known.params.min_agreement, costs.agreement)
        if not costs.level.known or costs.tree_rows:  # further levels of a tree in one forward are free
            return TreeExpansion(None, rate, verify, agreement)
        floor = expansion_floor(rate, costs.forward_ms(batch) / batch, prices.row_ms, agreement, known.params)
        return TreeExpansion(costs.level, rate, verify, agreement, floor)

    def _prefill_limit(self, costs: DraftCosts, decisions: Sequence[DraftDecision], step: StepInputs) -> int:
        """Tokens of draft prefill that fit into this step without delaying other sequences much."""
        params = self.estimates.params
        shared = len(step.sequences) > 1 or step.prefill_rows > 0
        if shared and DraftDecision.FORCED not in decisions:
            return costs.rows_within(params.prefill_plain_steps * step.prices.plain_ms)
        return params.max_prefill


def _lookup_decision(name: str, one: SequenceInputs, wanted: bool) -> DraftDecision:
    if name not in one.drafters or one.nodes <= 0:
        return DraftDecision.INELIGIBLE
    return DraftDecision.FREE if wanted or one.forced else DraftDecision.OFF


def _covered(step: StepInputs, at: int) -> float:
    """Chance that one of the trees proposed so far for a sequence holds its next token."""
    best = 0.0
    for work in step.drafted.values():
        tree = work.trees[at]
        if tree is not None and len(tree.parents) > 1:
            parents, scores = tree.parents, tree.scores
            best = max(best, sum([math.exp(scores[n]) for n in range(1, len(parents)) if parents[n] == 0]))
    return min(1.0, best)


def _node_floors(known: Estimates, step: StepInputs, decisions: Sequence[DraftDecision]) -> list[float | None]:
    """The `DraftRequest.floors` for ``decisions``: a node must be worth its row.

    Trials and sequences of mode ON have no floor, and every `probe_every` steps no sequence has, so that an estimate
    that fell too low is corrected.
    """
    params = known.params
    price, unbounded = known.rate(step) * step.prices.row_ms, known.steps % params.probe_every == 0

    def floor(one: SequenceInputs, decision: DraftDecision) -> float | None:
        if decision in (DraftDecision.PROBE, DraftDecision.FORCED):
            return -math.inf
        if decision not in (DraftDecision.ON, DraftDecision.FREE):
            return None
        share = params.late_price_share if one.due > 1 else 1.0
        return -math.inf if unbounded else math.log(max(params.min_node_chance, share * price))

    return [floor(one, decision) for one, decision in zip(step.sequences, decisions, strict=True)]


def _choose_nodes(known: Estimates, step: StepInputs) -> Plan:
    """Merge all proposals, and choose the nodes to verify."""
    prices, works = step.prices, list(step.drafted.values())
    trees = [
        merge([TokenTree(one.pending), *(tree for work in works if (tree := work.trees[i]) is not None)])
        for i, one in enumerate(step.sequences)
    ]
    proposed = sum([len(tree.tokens) - 1 for tree in trees])
    if not proposed:
        idle = not (step.constrained or any(work.ran for work in works))
        fewest, most = known.params.rest_steps
        rested = min([step.rested, *[one.emitted for one in step.sequences]])  # not those of earlier requests
        rest = max(fewest, min(2 * rested, most)) if idle else 0
        return Plan([], trees, [[] for _ in trees], 0, float(len(trees)), prices.plain_ms, rest)
    costs = known.verify.span(min(prices.rows, known.verify.largest), proposed, prices.context)
    prompts_ms = max(0.0, costs[0] - prices.decode_ms)
    draft_ms = sum([work.ms for work in works])
    plan = choose(step.sequences, trees, costs, draft_ms, known.rate(step), prompts_ms, known.params)
    plan.verify_ms = prices.plain_ms + costs[min(plan.budget, len(costs) - 1)] - costs[0]
    return plan
