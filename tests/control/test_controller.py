"""What the controller learns from steps, beyond what its parts learn alone."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from dataclasses import asdict

import pytest

from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.drafters import DraftCosts
from specdec.control.inputs import DraftDecision, DraftWork, Match, SequenceInputs, StepInputs
from specdec.control.learning import Estimates
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.core.tree import TokenTree
from tests.control.helpers import chain, make_one, outcome_of, take_step

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROW_MS = 4.0


def make_controller() -> Controller:
    """A target whose rows take as long as reading its weights, and a drafter of a millisecond a level."""
    verify = CostTable(ROWS, [0], [[ROW_MS * n for n in ROWS]])
    return Controller(Estimates({"m": True}, verify, {"m": CostTable(ROWS, [0], [[1.0] * len(ROWS)])}))


def run_step(
    controller: Controller, sequences: list[SequenceInputs], trees: list[TokenTree], tokens: list[list[int]],
    draft_ms: float = 1.0, prefill_rows: int = 0, verify_ms: float | None = None, decision: str = "on",
) -> None:  # fmt: skip
    """Run one step in which the drafter proposed ``trees``. It takes the time in the table unless given."""
    works = {"m": DraftWork(list(trees), 1, draft_ms, [decision] * len(sequences))} if decision else {}
    step, plan = take_step(controller, sequences, works, prefill_rows)
    rows = len(sequences) + prefill_rows + plan.budget
    outcome = outcome_of(plan, tokens, ROW_MS * rows if verify_ms is None else verify_ms, draft_ms)
    outcome.rows = rows
    controller.observe(step, plan, outcome)


def test_bug_prompt_rows_that_are_cheaper_do_not_change_the_cost_of_sampled_rows() -> None:
    controller = make_controller()
    sequences = [make_one(i) for i in range(8)]
    for _ in range(30):
        run_step(controller, sequences, [TokenTree(0)] * 8, [[1]] * 8, 0.0, 100, ROW_MS * (8 + 0.6 * 100), decision="")
    assert controller.estimates.verify.ms(8) == pytest.approx(ROW_MS * 8)
    assert controller.estimates.prices([0] * 8, 100).plain_ms == pytest.approx(ROW_MS * (8 + 0.6 * 100), rel=0.02)


def test_a_forward_that_was_not_measured_changes_no_cost() -> None:
    controller, one = make_controller(), make_one()
    before = controller.estimates.prices([0], 100).plain_ms
    for prefill_rows in (0, 100):
        run_step(controller, [one], [TokenTree(0)], [[1]], 0.0, prefill_rows, 0.0, decision="")
    assert controller.estimates.prices([0], 100).plain_ms == before


@pytest.mark.parametrize(("decision", "brings"), [("on", False), ("probe", True)])
def test_bug_an_unverified_node_gains_nothing_even_if_it_was_right(decision: str, brings: bool) -> None:
    """Its estimated probability is far below the cost of a row, and it always is the target's next token."""
    controller, one = make_controller(), make_one()
    for _ in range(60):
        run_step(controller, [one], [chain([0.05], tokens=[7], source="m", cells=[0])], [[7]], decision=decision)
    record = one.history.records["m"]
    assert record.tokens / record.steps == pytest.approx(1.0 if brings else 0.0, abs=0.1)


def test_bug_time_is_never_valued_below_plain_decoding() -> None:
    """Steps in which drafting takes three times as long as the forward, for nothing."""
    controller, one = make_controller(), make_one()
    for _ in range(60):
        run_step(controller, [one], [TokenTree(0)], [[1]], draft_ms=3 * ROW_MS)
    assert controller.estimates.rate(StepInputs(controller.estimates.prices([0]), [one])) == pytest.approx(1 / ROW_MS)


def test_steps_without_a_decision_count_as_idle_ones() -> None:
    controller, one = make_controller(), make_one()
    run_step(controller, [one], [chain([0.9], source="m", cells=[0])], [[1]])
    step, plan = take_step(controller, [one], {"m": DraftWork([None], decisions=[DraftDecision.OFF])})
    step.rested = plan.rest
    controller.observe(step, plan, outcome_of(plan, [[1]]))
    assert one.history.records["m"].idle == controller.estimates.yields["m"].pool(0).idle == 1 + PARAMS.rest_steps[0]


@pytest.mark.parametrize(
    ("decision", "wish", "prefill_rows", "rests"),
    [
        ("off", {}, 0, True),
        ("on", {}, 0, False),
        ("off", {"due": 1.5}, 0, False),
        ("off", {"due": 0.5}, 0, True),
        ("off", {}, 7, False),
    ],
)
def test_only_free_decisions_against_drafting_last(
    decision: str, wish: dict[str, float], prefill_rows: int, rests: bool
) -> None:
    work = DraftWork([TokenTree(0) if decision == "on" else None], decisions=[DraftDecision(decision)])
    _, plan = take_step(make_controller(), [make_one(**wish)], {"m": work}, prefill_rows)
    assert plan.rest == (PARAMS.rest_steps[0] if rests else 0)


@pytest.mark.parametrize(
    ("rested", "emitted", "rest"),
    [(0, 99, 8), (3, 99, 8), (8, 99, 16), (12, 99, 24), (16, 99, 32), (100, 99, 32), (100, 1, 8), (100, 9, 18)],
)
def test_a_decision_against_drafting_lasts_longer_each_time(rested: int, emitted: int, rest: int) -> None:
    """Steps of earlier requests do not count: another one has emitted 99 tokens."""
    controller = make_controller()
    sequences = [make_one(1, emitted=99), make_one(2, emitted=emitted)]
    step = StepInputs(controller.estimates.prices([0, 0]), sequences, rested=rested)
    step.drafted["m"] = DraftWork([None, None], decisions=[DraftDecision.OFF] * 2)
    assert controller.decide(step).rest == rest


def state(controller: Controller) -> str:
    return repr({name: value for name, value in vars(copy.deepcopy(controller)).items() if name not in ("_drafters",)})


def test_deciding_changes_no_estimate() -> None:
    controller, sequences = make_controller(), [make_one(1), make_one(2)]
    for _ in range(5):
        run_step(controller, sequences, [chain([0.5, 0.5], source="m", cells=[0, 1])] * 2, [[1, 2, 9], [7]])

    def learnt() -> str:
        return repr(
            ([asdict(one) for one in sequences], controller.estimates.yields["m"].pools, controller.estimates.speedup)
        )

    before = learnt()
    plans = [
        take_step(controller, sequences, {"m": DraftWork([chain([0.9], source="m", cells=[0])] * 2, 1, 1.0)})[1]
        for _ in range(3)
    ]
    assert plans[0] == plans[1] == plans[2] or [p.kept for p in plans] == [plans[0].kept] * 3
    assert learnt() == before


def lookup_controller() -> Controller:
    return Controller(Estimates({"s": False}, CostTable.guess(64), {}))


def lookup_work(sequences: list[SequenceInputs], chance: float) -> DraftWork:
    return DraftWork([chain([chance] * 3, source="s", cells=[0, 0, 0]) for _ in sequences], 1, 1.0)


def test_a_step_may_be_learned_from_after_the_next_was_decided() -> None:
    """It learns about its own sequences and nodes."""
    first, second = [make_one(1, forced=True), make_one(2, forced=True)], [make_one(3, forced=True)]
    late, prompt = lookup_controller(), lookup_controller()
    step, plan = take_step(late, first, {"s": lookup_work(first, 0.9)})
    after, after_plan = take_step(late, second, {"s": lookup_work(second, 0.5)})
    late.observe(step, plan, outcome_of(plan, [[1, 2, 3, 9], [7]]))
    assert second[0].history.records == {}
    alone = [make_one(1, forced=True), make_one(2, forced=True)]
    step, plan = take_step(prompt, alone, {"s": lookup_work(alone, 0.9)})
    prompt.observe(step, plan, outcome_of(plan, [[1, 2, 3, 9], [7]]))
    assert [asdict(one.history) for one in first] == [asdict(one.history) for one in alone]
    late.observe(after, after_plan, outcome_of(after_plan, [[1, 9]]))
    assert second[0].history.rates["s"].observed == 1.0


def test_an_outcome_of_other_sequences_is_rejected() -> None:
    controller, sequences = lookup_controller(), [make_one(1), make_one(2)]
    step, plan = take_step(controller, sequences, {"s": lookup_work(sequences, 0.9)})
    with pytest.raises(ValueError, match="zip"):
        controller.observe(step, plan, outcome_of(plan, [[1]]))


@pytest.mark.parametrize(("draft_ms", "least", "most"), [(0.1, 100, 100), (500.0, 1, 60)])
def test_the_time_to_run_lookup_drafters_counts(draft_ms: float, least: int, most: int) -> None:
    """A node is accepted every time. If proposing takes as long as several tokens, the drafter soon runs rarely."""
    controller, one, times = lookup_controller(), make_one(), 0
    for _ in range(100):
        step = StepInputs(controller.estimates.prices([0]), [one])
        (request,) = controller.decide(step).requests
        asks = request.proposing == 1
        times += asks
        tree = chain([0.9], source="s", cells=[0]) if asks else None
        step.drafted["s"] = DraftWork([tree], int(asks), 0.0, request.decisions)
        plan = controller.decide(step)
        controller.observe(step, plan, outcome_of(plan, [[1, 9] if asks else [9]], 20.0, draft_ms if asks else 0.0))
    assert least <= times <= most


def test_another_process_in_one_proposal_does_not_end_lookups() -> None:
    """A time that lasts is learned all the same."""
    controller, one = lookup_controller(), make_one(forced=True)

    def propose(draft_ms: float, times: int) -> float:
        for _ in range(times):
            step, plan = take_step(controller, [one], {"s": lookup_work([one], 0.9)})
            step.drafted["s"].ms = draft_ms / 2
            controller.observe(step, plan, outcome_of(plan, [[1, 2, 9]], draft_ms=draft_ms))
        return controller.estimates.lookups_ms(1)

    usual = propose(0.2, 50)
    assert propose(60.0, 1) < 1.5 * usual
    assert propose(60.0, 50) > 50.0


@pytest.mark.parametrize(("wish", "decision"), [({"forced": True}, "free"), ({"first": True}, "free"), ({}, "off")])
def test_costly_lookup_drafters_run_in_mode_on_and_for_first_tokens_only(wish: dict[str, bool], decision: str) -> None:
    controller, one = lookup_controller(), make_one(**wish)
    controller.estimates.lookup_ms = 1e6
    (request,) = controller.decide(StepInputs(controller.estimates.prices([0]), [one])).requests
    assert request.decisions == [decision]


@pytest.mark.parametrize(("share", "least"), [(0.01, Match.WEAK), (0.1, Match.STRONG)])
def test_costly_lookup_drafters_propose_nothing_after_a_single_token(share: float, least: Match) -> None:
    """Such proposals bring a fifth of a token. share: of a token's time that a step's proposals take. Four sequences
    share a step, so a token takes about a quarter of it."""
    controller, sequences = lookup_controller(), [make_one(key) for key in range(4)]
    assert controller.estimates.least_match is Match.WEAK  # before any proposal was timed
    for _ in range(40):
        works = {"s": DraftWork([chain([0.9], source="s", cells=[0])] * 4, 1, 0.0)}
        step, plan = take_step(controller, sequences, works)
        draft_ms = share * step.prices.token_ms
        controller.observe(step, plan, outcome_of(plan, [[1, 9]] * 4, draft_ms=draft_ms))
    assert controller.estimates.least_match is least


@pytest.mark.parametrize(("right", "least", "most"), [(True, 200, 200), (False, 1, 100)])
def test_costly_lookup_drafters_run_where_they_bring_tokens(right: bool, least: int, most: int) -> None:
    """A proposal takes a third of a token's time. Steps without a decision count as idle ones."""
    controller, one, times, idle = lookup_controller(), make_one(), 0, 0
    for _ in range(200):
        step = StepInputs(controller.estimates.prices([0]), [one], rested=3)
        (request,) = controller.decide(step).requests
        asks = request.proposing == 1
        times, idle = times + asks, 0 if asks else idle + 1 + step.rested
        tree = chain([0.9], source="s", cells=[0]) if asks else None
        step.drafted["s"] = DraftWork([tree], int(asks), 0.0, request.decisions)
        plan, tokens = controller.decide(step), [1, 9] if asks and right else [9]
        controller.observe(step, plan, outcome_of(plan, [tokens], 10.0, asks * step.prices.token_ms / 3))
        assert controller.estimates.lookup_yield.pool(0).idle == idle
    assert least <= times <= most


@pytest.mark.parametrize(("matched", "proposing"), [(8, 8), (1, 0)])
def test_only_sequences_with_a_match_share_the_price_of_lookups(matched: int, proposing: int) -> None:
    """A step with proposals takes three tokens' time longer, and a proposal is expected to bring half a token."""
    controller, prices = lookup_controller(), lookup_controller().estimates.prices([0] * 8)
    controller.estimates.lookup_step_ms = 3 * prices.token_ms
    sequences = [make_one(key, drafters=("s",) if key < matched else ()) for key in range(8)]
    (request,) = controller.decide(StepInputs(prices, sequences)).requests
    assert request.proposing == proposing


def test_steps_without_a_decision_count_in_the_value_of_time() -> None:
    """Two tokens in one step of ten are worth less than two in each. A long rest is soon forgotten."""
    values = []
    for rests in ([0] * 100, [9] * 100, [0] * 100 + [10**6] + [0] * 40):
        controller, one = lookup_controller(), make_one()
        for rested in rests:
            step, plan = take_step(controller, [one], {"s": DraftWork([chain([0.9], source="s", cells=[0])], 1, 0.0)})
            step.rested = rested
            controller.observe(step, plan, outcome_of(plan, [[1, 9]]))
        values.append(controller.estimates.speedup.value)
    assert values == pytest.approx([1.9, 1.1, 1.8], abs=0.06)


def test_the_cost_of_prefilling_a_long_text_is_learned() -> None:
    """Rows are measured while something else runs."""
    costs = DraftCosts(CostTable([1, 32], [0], [[10.0, 320.0]]))
    believed = costs.prefill_ms(150)
    for _ in range(2):
        costs.observe(1, 2, 150, 220.0, 220.0)
    assert costs.prefill_ms(150) < 0.3 * believed


def test_a_lookup_drafters_estimate_is_per_sequence() -> None:
    """In sixty steps one text continues as copied and another never does, then the copying one diverges."""
    controller, copied, written = lookup_controller(), make_one(1, forced=True), make_one(2, forced=True)
    sequences, cell = [copied, written], controller.estimates.calibration.cell("s", 0, 0, 1, 0.9)

    def chances() -> list[float]:
        return [math.exp(controller.odds("s", one)(0, 1, 0.9)[0]) for one in sequences]

    def steps(count: int, tokens: list[list[int]]) -> None:
        for _ in range(count):
            works = [chain([0.9] * 3, source="s", cells=[cell] * 3) for _ in sequences]
            step, plan = take_step(controller, sequences, {"s": DraftWork(works, 1, 1.0)})
            controller.observe(step, plan, outcome_of(plan, tokens))

    assert chances() == [controller.estimates.calibration.chance(cell, 0.9)] * 2
    steps(60, [[1, 2, 3, 9], [9]])
    assert chances()[0] == controller.estimates.calibration.chance(cell, 0.9)
    assert chances()[1] < 0.25 * chances()[0]
    steps(20, [[9], [9]])
    assert chances()[0] < 0.5 * controller.estimates.calibration.chance(cell, 0.9)
    steps(60, [[1, 2, 3, 9], [1, 2, 3, 9]])
    assert min(chances()) > 0.95 * controller.estimates.calibration.chance(cell, 0.9)


def test_the_time_of_a_text_without_its_start_is_not_taken_for_that_of_the_whole() -> None:
    """A level of one row takes 1 ms, and each further row 0.1 ms."""
    verify, level = ([[ms * n + base for n in ROWS]] for ms, base in ((ROW_MS, 0.0), (0.1, 0.9)))
    controller = Controller(Estimates({"m": True}, CostTable(ROWS, [0], verify), {"m": CostTable(ROWS, [0], level)}))
    for key in range(40):
        one = make_one(key, pending_prefill={"m": (600, 61)})
        run_step(controller, [one], [TokenTree(0)], [[1]], draft_ms=7.0)
    assert controller.estimates.costs["m"].prefill_ms(61) == pytest.approx(6.0, rel=0.02)


def test_constants_are_recorded() -> None:
    made = make_controller()
    other = dataclasses.replace(PARAMS, model_prior=(0.0, 3.0, 3.0), first_token_delay=2.0)
    described = json.loads(json.dumps(Controller.from_dict(made.as_dict() | {"params": asdict(other)}).as_dict()))
    assert Controller.from_dict(described).estimates.params == other


def test_other_constants_change_decisions() -> None:
    """A drafter that is expected to bring six tokens a step runs; by the default prior its rows cost more."""
    promising = asdict(dataclasses.replace(PARAMS, model_prior=(6.0, 3.0, 3.0)))
    for params, decision in (({}, DraftDecision.OFF), (promising, DraftDecision.ON)):
        controller = Controller.from_dict(make_controller().as_dict() | {"params": params})
        step = StepInputs(controller.estimates.prices([0]), [make_one()])
        (request,) = controller.decide(step).requests
        assert request.decisions == [decision]


@pytest.mark.parametrize(("prompt", "kept"), [(250, 5), (253, 2), (255, 0), (256, 7)])
def test_drafts_at_a_prompts_end_never_pad_the_forward_to_a_larger_size(prompt: int, kept: int) -> None:
    """Beside a prompt of 256 tokens the forward has 257 rows anyway, and is padded to 384."""
    verify = CostTable([1, 128, 256, 384], [0], [[4.0, 5.0, 8.0, 12.0]], sizes=(1, 2, 4, 8, 64, 128, 256, 384))
    controller = Controller(Estimates({"s": False}, verify, {}))
    works = {"s": DraftWork([chain([0.9] * 7)])}
    assert take_step(controller, [make_one(first=True)], works, prompt)[1].budget == kept


def test_nodes_fill_the_rows_that_are_computed_anyway_and_no_larger_size() -> None:
    verify = CostTable([1, 4, 16], [0], [[4.0, 4.5, 9.0]], sizes=(1, 4, 16))
    unlikely = [chain([0.3] * 9) for _ in range(3)]
    plans = [take_step(Controller(Estimates({"s": False}, table, {})), [make_one(i) for i in range(3)],
                       {"s": DraftWork(list(unlikely))})[1]
             for table in (verify, CostTable.from_dict(verify.as_dict() | {"sizes": ()}))]  # fmt: skip
    assert [plan.budget for plan in plans] == [1, 3]


@pytest.mark.parametrize(
    ("levels", "pending", "prefilled"), [(0, 0, 0), (0, 0, 300), (1, 300, 0)], ids=["rests", "prefills", "reads first"]
)
def test_a_level_that_a_step_does_not_measure_follows_the_targets_speed(
    levels: int, pending: int, prefilled: int
) -> None:
    """The machine becomes twice as fast. The price of a level falls with the target's, also while long prefill hides
    what a level takes."""
    controller = make_controller()
    costs, one = controller.estimates.costs["m"], make_one(pending_prefill={"m": (pending, pending)})
    before = costs.level.ms(1)
    for _ in range(60):
        proposed = [TokenTree(0)] if levels else [None]
        step, plan = take_step(controller, [one], {"m": DraftWork(proposed, levels, 5.0, prefilled=prefilled)})
        controller.observe(step, plan, outcome_of(plan, [[1]], ROW_MS / 2, 5.0))
    assert controller.estimates.verify.ms(1) == pytest.approx(ROW_MS / 2, rel=0.05)
    assert costs.level.ms(1) == pytest.approx(before / 2, rel=0.05)


def test_steps_with_prompts_change_no_price_of_a_level() -> None:
    """They measure the price of prompts alone."""
    controller, one = make_controller(), make_one()
    before = controller.estimates.costs["m"].level.ms(1)
    for _ in range(30):
        run_step(controller, [one], [TokenTree(0)], [[1]], 0.0, 100, ROW_MS * 300, decision="")
    assert controller.estimates.costs["m"].level.ms(1) == before
