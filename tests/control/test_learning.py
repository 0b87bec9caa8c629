"""What one kind of step teaches, and what it must not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.learned import Learned
from specdec.control.inputs import DraftDecision, DraftWork, SequenceInputs, StepInputs
from specdec.control.learning import Estimates
from specdec.control.params import DEFAULT_PARAMS as PARAMS
from specdec.core.tree import TokenTree
from tests.control.helpers import chain, make_one, make_tree, outcome_of, take_step

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def make_controller(row_ms: float = 1.0) -> Controller:
    """The target's forward takes 9 ms and ``row_ms`` a row; a level of the model 0.5 ms and as much a row."""
    verify, level = (CostTable(ROWS, [0], [[base + ms * n for n in ROWS]]) for base, ms in ((9.0, row_ms), (0.5, 0.5)))
    return Controller(Estimates({"s": False, "m": True}, verify, {"m": level}))


def run_step(
    controller: Controller, sequences: list[SequenceInputs], works: dict[str, DraftWork], tokens: list[list[int]],
    draft_ms: float = 0.0, prefill_rows: int = 0,
) -> None:  # fmt: skip
    """A step whose forward takes the time in the table."""
    step, plan = take_step(controller, sequences, works, prefill_rows)
    outcome = outcome_of(plan, tokens, draft_ms=draft_ms)
    outcome.rows += prefill_rows
    outcome.verify_ms = 9.0 + outcome.rows
    controller.observe(step, plan, outcome)


def copied(*chances: float) -> TokenTree:
    return chain(chances, source="s", cells=[0] * len(chances))


@pytest.mark.parametrize(("known", "speedup"), [(True, (12 + 63) / (12 + 3.6 + 6.6)), (False, 1.0)])
def test_time_is_first_worth_what_the_draft_model_is_expected_to_bring(known: bool, speedup: float) -> None:
    """Twelve steps, of which two are the prior's, brought 63 tokens, and took 36 levels and 66 rows of a tenth of a
    plain step each. A model whose levels were never timed promises nothing."""
    like, start = make_controller().as_dict(), Learned([], [(0, 10.0, 60.0, 30.0, 60.0)], None)
    like["drafting"]["m"]["measured"] = known
    controller = Controller.from_dict(like | {"start": {"m": start.as_dict()}})
    assert controller.estimates.speedup.value == pytest.approx(speedup)


def test_a_replay_begins_with_the_same_estimates() -> None:
    like = make_controller().as_dict()
    start = Learned([(2, 3.0, 4.0)], [(0, 10.0, 60.0, 30.0, 60.0)], 0.9)
    made = Controller.from_dict(like | {"start": {"m": start.as_dict()}})
    again = Controller.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again.estimates.learned() == made.estimates.learned() != {}
    assert again.estimates.speedup == made.estimates.speedup


@pytest.mark.parametrize("used", [True, False])
def test_rates_are_recomputed_from_time_to_time(used: bool) -> None:
    controller, one = make_controller(), make_one()
    cell = controller.estimates.calibration.cell("s", 0, 0, 1, 0.5)
    before = controller.estimates.calibration.rate(cell)
    for _ in range(PARAMS.refresh_steps):
        assert controller.estimates.calibration.rate(cell) == before
        works = {"s": DraftWork([chain([0.5], source="s", cells=[cell])])} if used else {}
        run_step(controller, [one], works, [[1, 9] if used else [9]])
    assert (controller.estimates.calibration.rate(cell) > before) == used


@pytest.mark.parametrize(
    ("wish", "prefill_rows", "counts"),
    [({}, 0, True), ({"forced": True}, 0, False), ({"due": 2.0}, 0, False), ({}, 50, False)],
)
def test_only_free_decisions_measure_what_drafting_brings(wish: Any, prefill_rows: int, counts: bool) -> None:
    controller, one = make_controller(), make_one(**wish)
    known = controller.estimates
    before = known.speedup.value, known.lookup_gain
    for _ in range(5):
        run_step(controller, [one], {"s": DraftWork([copied(0.9, 0.9)])}, [[1, 2, 9]], prefill_rows=prefill_rows)
    after = known.speedup.value, known.lookup_gain
    assert (after != before) == counts
    assert (after[1] > 0.0) == counts


def test_the_gain_of_lookups_is_a_sequences_tokens_less_the_price_of_their_rows() -> None:
    """Each of four sequences gets one of two nodes. A token without drafts takes 13/4 ms, and a row 1 ms."""
    controller, sequences = make_controller(), [make_one(key) for key in range(4)]
    for _ in range(80):
        run_step(controller, sequences, {"s": DraftWork([copied(0.9, 0.9)] * 4)}, [[1, 9]] * 4)
    assert controller.estimates.lookup_gain == pytest.approx(1.0 - 2 * 4 / 13, rel=0.01)


@pytest.mark.parametrize(("draft_ms", "overhead"), [(5.0, 1.0), (8.0, 1.4)])
def test_the_time_of_lookups_is_not_that_of_the_model(draft_ms: float, overhead: float) -> None:
    """Lookups are known to take 2 ms, and two levels for two of three sequences take 3. What remains of the stage is
    the model's."""
    controller, sequences = make_controller(), [make_one(key) for key in range(3)]
    known = controller.estimates
    known.lookup_step_ms, known.lookup_ms = 0.5, 0.5
    for _ in range(120):
        works = {
            "s": DraftWork([TokenTree(0)] * 3, 0, 0.5),
            "m": DraftWork([chain([0.9] * 3, source="m", cells=[0] * 3)] * 2 + [None], 2, 3.0),
        }
        run_step(controller, sequences, works, [[1, 2, 3, 9], [1, 2, 3, 9], [9]], draft_ms)
    assert known.lookups_ms(3) == 2.0
    assert known.costs["m"].levels(1)[1] == pytest.approx(overhead, rel=0.05)
    assert known.draft_ms("m", 2, 2) == pytest.approx(3.0)
    # Three sequences get nine tokens for a forward of nine rows, the lookups' time and that of the levels.
    assert known.speedup.value == pytest.approx(3.0 * 12.0 / (18.0 + 2.0 + 3.0), rel=0.01)


def test_a_step_that_only_prefills_measures_the_price_of_prefill() -> None:
    controller, one = make_controller(), make_one(pending_prefill={"m": (1000, 1000)})
    believed = controller.estimates.costs["m"].prefill_ms(100)
    for _ in range(60):
        work = DraftWork([None], 0, believed / 2, [DraftDecision.PREFILL], prefilled=100)
        run_step(controller, [one], {"m": work}, [[9]], believed / 2)
    assert controller.estimates.costs["m"].prefill_ms(100) == pytest.approx(believed / 2, rel=0.05)


def test_a_tree_answers_for_its_own_levels_and_nodes() -> None:
    """One tree stops after a level and the other after three, and both are right. Lookups propose another token."""
    controller, sequences = make_controller(), [make_one(key) for key in range(2)]
    for _ in range(100):
        trees = [chain([0.9] * depth, source="m", cells=[0] * depth) for depth in (1, 3)]
        other = chain([0.9], tokens=[7], source="s", cells=[1])
        run_step(
            controller,
            sequences,
            {"s": DraftWork([other] * 2), "m": DraftWork(list(trees), 3, 4.5)},
            [[1, 9], [1, 2, 3, 9]],
        )
    for one, depth in zip(sequences, (1, 3), strict=True):
        record = one.history.records["m"]
        assert record.steps * depth == pytest.approx(record.tokens) == pytest.approx(record.levels)
        assert record.rows == pytest.approx(record.tokens)
    assert controller.estimates.costs["m"].agreement > 0.95


def test_the_nodes_that_mode_on_verifies_regardless_are_no_price_of_drafting() -> None:
    """The tree holds both tokens of each of two levels. The same nodes would cost a request of mode AUTO two rows."""
    controller, one = make_controller(), make_one(forced=True)
    tree = make_tree([(0, 1, 0.9), (0, 2, 0.1), (1, 1, 0.9), (1, 2, 0.1)], "m", cells=[0] * 4)
    run_step(controller, [one], {"m": DraftWork([tree], 2, 2.0)}, [[1, 2, 9]])
    record = one.history.records["m"]
    assert (record.tokens, record.levels, record.rows) == (2.0, 2.0, 2.0)


def test_a_drafter_that_cannot_begin_is_soon_asked_no_more() -> None:
    """Its turn takes no forward, and so no time that counts."""
    controller, one, asked = make_controller(), make_one(), 0
    for _ in range(100):
        step, _ = take_step(controller, [one], {})
        asks = step.drafted["m"].decisions == [DraftDecision.ON]
        asked += asks
        run_step(controller, [one], {"m": DraftWork([TokenTree(0) if asks else None], 0, 0.0)}, [[9]])
    assert 0 < asked < 20
    assert controller.estimates.costs["m"].agreement == PARAMS.first_agreement


def test_a_step_whose_row_cannot_be_sampled_brings_no_tokens() -> None:
    controller, one = make_controller(), make_one()
    run_step(controller, [one], {"m": DraftWork([chain([0.9], source="m", cells=[0])], 1, 1.0)}, [[]])
    assert one.history.records["m"].tokens == 0.0


def test_only_nodes_that_can_be_judged_are_counted() -> None:
    """Of two siblings the first is right. The child of the second follows another text, and that of the first has no
    cell."""
    controller, one = make_controller(), make_one()
    calibration = controller.estimates.calibration
    right, wrong = (calibration.cell("m", 0, rank, 1, 0.5) for rank in (0, 1))
    tree = make_tree([(0, 1, 0.5), (0, 2, 0.4), (2, 5, 0.9), (1, 5, 0.9)], "m", cells=[right, wrong, wrong, -1])
    run_step(controller, [one], {"m": DraftWork([tree], 2, 2.0)}, [[1, 5, 9]])
    assert [(hits, trials) for _, hits, trials in calibration.counts("m")] == [(1.0, 1.0), (0.0, 1.0)]
    assert calibration.counts("s") == []


def test_lookups_that_only_cost_rows_can_still_be_weighed() -> None:
    """They bring no tokens, never fewer than none: in mode ON their wrong nodes are verified in every step."""
    controller, forced = make_controller(), make_one(forced=True)
    controller.estimates.lookup_step_ms = 5.0
    for _ in range(300):
        run_step(controller, [forced], {"s": DraftWork([copied(*[0.9] * 9)])}, [[9]], draft_ms=5.0)
    step, _ = take_step(controller, [make_one(2)], {})
    assert step.drafted["s"].decisions == [DraftDecision.OFF]


@pytest.mark.parametrize("wish", [{"nodes": 0}, {"drafters": ()}])
def test_nobody_drafts_for_a_sequence_that_takes_no_nodes(wish: Any) -> None:
    step, plan = take_step(make_controller(), [make_one(forced=True, **wish)], {})
    assert {name: work.decisions for name, work in step.drafted.items()} == {
        name: [DraftDecision.INELIGIBLE] for name in ("s", "m")
    }
    assert plan.kept == [[]]


@pytest.mark.parametrize(("wish", "decision"), [({"first": True}, ""), ({"first": True, "forced": True}, "forced")])
def test_a_model_delays_a_first_token_in_mode_on_alone(wish: Any, decision: str) -> None:
    step, _ = take_step(make_controller(), [make_one(**wish)], {})
    assert step.drafted["m"].decisions == [decision]


@pytest.mark.parametrize(("gain", "drafts"), [(0.0, True), (3.0, False), (-5.0, True)])
def test_a_model_must_beat_decoding_with_lookups(gain: float, drafts: bool) -> None:
    """It is expected to bring one and a half tokens of 10 ms for 6 ms. Lookups that bring none raise no price."""
    controller = make_controller()
    controller.estimates.lookup_gain = gain
    step, _ = take_step(controller, [make_one()], {})
    assert (step.drafted["m"].decisions == [DraftDecision.ON]) == drafts


@pytest.mark.parametrize(
    ("wish", "pending"), [({"emitted": 4}, 40), ({"emitted": 10**5}, 600), ({"emitted": 4, "forced": True}, 600)]
)
def test_the_whole_text_is_read_for_long_answers_and_in_mode_on(wish: Any, pending: int) -> None:
    step, _ = take_step(make_controller(), [make_one(pending_prefill={"m": (600, 40)}, **wish)], {})
    assert step.drafted["m"].pending == [pending]


@pytest.mark.parametrize(
    ("sequences", "wish", "prefill_rows", "tokens"),
    [
        (1, {}, 0, PARAMS.max_prefill),
        (2, {}, 0, 43),  # two plain steps of 11 ms
        (1, {}, 50, PARAMS.prefill_chunk),  # the prompt is another sequence's
        (1, {"first": True, "forced": True}, 50, PARAMS.max_prefill),
        (2, {"forced": True}, 0, PARAMS.max_prefill),
    ],
)
def test_long_prefill_of_a_draft_delays_no_other_sequence(
    sequences: int, wish: Any, prefill_rows: int, tokens: int
) -> None:
    long = make_one(pending_prefill={"m": (600, 600)}, emitted=1000, **wish)
    controller, others = make_controller(), [make_one(key) for key in range(2, 1 + sequences)]
    step = StepInputs(controller.estimates.prices([0] * sequences, prefill_rows), [long, *others], prefill_rows)
    step.drafted["s"] = DraftWork([None] * sequences)
    (request,) = controller.decide(step).requests
    assert request.prefill == {0: tokens}


@pytest.mark.parametrize(("agreement", "priced"), [(0.7, 0.7), (0.01, PARAMS.min_agreement)])
def test_a_node_is_expanded_for_its_share_of_a_level(agreement: float, priced: float) -> None:
    """Four sequences share a level of 2.5 ms, and a row takes 0.1 ms. A drafter that was always wrong may recover."""
    controller = make_controller(row_ms=0.1)
    controller.estimates.costs["m"].agreement = agreement
    step = StepInputs(controller.estimates.prices([0] * 4), [make_one(key, forced=True) for key in range(4)])
    step.drafted["s"] = DraftWork([None] * 4)
    (request,) = controller.decide(step).requests
    assert request.expansion is not None
    assert request.expansion.agreement == priced
    price = controller.estimates.rate(step) * (2.5 / 4 + 0.1) / priced
    assert math.exp(request.expansion.floor) == pytest.approx(min(price, PARAMS.max_level_price))


@pytest.mark.parametrize(
    ("steps", "wish", "row_ms", "chance"),
    [
        (0, {}, 1.0, 0.0),  # from time to time any node is proposed
        (1, {}, 1.0, 1.0 / 10),
        (1, {"due": 2.0}, 1.0, PARAMS.late_price_share / 10),
        (1, {}, 1e-3, PARAMS.min_node_chance),
    ],
)
def test_a_proposed_node_is_worth_its_row(steps: int, wish: Any, row_ms: float, chance: float) -> None:
    controller = make_controller(row_ms)
    known = controller.estimates
    known.steps, known.speedup.observed, known.speedup.expected = steps, 1.0, 1.0
    step = StepInputs(known.prices([0]), [make_one(**wish)])
    ((floor,),) = [request.floors for request in controller.decide(step).requests]
    assert floor is not None
    assert math.exp(floor) == pytest.approx(chance)


def test_a_wrong_node_says_nothing_of_those_behind_it() -> None:
    controller, one = make_controller(), make_one()
    run_step(controller, [one], {"m": DraftWork([chain([0.9] * 3, source="m", cells=[0] * 3)], 3, 3.0)}, [[9]])
    agreement = controller.estimates.costs["m"].agreement
    assert agreement == pytest.approx(PARAMS.first_agreement * (1.0 - PARAMS.agreement_weight))


def test_a_proposal_ends_the_idle_time() -> None:
    controller, one = make_controller(), make_one()
    idle = []
    for proposes in (True, False, False, True):
        run_step(controller, [one], {"m": DraftWork([TokenTree(0) if proposes else None], proposes, 1.0)}, [[9]])
        idle.append((one.history.records["m"].idle, controller.estimates.yields["m"].pool(0).idle))
    assert idle == [(0, 0), (1, 1), (2, 2), (0, 0)]


def test_the_price_of_draft_prefill() -> None:
    """A level of n rows takes 0.5 ms and 0.5 ms a row. The first level of a tree computes a few tokens for nothing."""
    costs = make_controller().estimates.costs["m"]
    assert [costs.prefill_ms(n) for n in (16, 17, 192, 384)] == pytest.approx([0.0, 8.0, 95.5, 192.0])
    assert [costs.rows_within(ms) for ms in (0.1, 20.5, 1e3)] == [PARAMS.short_prefill, 40, PARAMS.prefill_chunk]
    assert costs.levels(300)[300] == costs.levels(256)[256] == 128.5
    for _ in range(100):  # a level with long prefill takes as long as expected
        costs.observe(1, 1, 100, 1.0 + costs.prefill_ms(100), 1.0 + costs.prefill_ms(100))
    assert costs.levels(1)[1] == pytest.approx(1.0)
    for _ in range(100):  # each of three sequences has a few tokens to compute, which measures the level
        costs.observe(3, 1, 3 * PARAMS.short_prefill, 4.0, 4.0)
    assert costs.level.ms(3) == pytest.approx(4.0, rel=0.05)
