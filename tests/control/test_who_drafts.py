"""A drafter is enabled when it pays, probed when that is worth the cost, and stable in between."""

from __future__ import annotations

import pytest

from specdec.control.estimates.drafters import DrafterYield
from specdec.control.inputs import DraftDecision, DraftRecord, SequenceInputs
from specdec.control.policies.who_drafts import DraftPrices, choose_sequences, reads_end_alone
from tests.control.helpers import make_one

PLAIN_MS = 10.0
PRIOR = (1.5, 3.0, 3.0)


def make_yield() -> DrafterYield:
    return DrafterYield("m", PRIOR)


def decide(
    drafter: DrafterYield, sequences: list[SequenceInputs], level_ms: float, covered: float = 0.0,
    prefill_ms: float = 0.0, row_ms: float = 0.0, more_ms: float = 0.0, eligible: bool = True,
) -> list[DraftDecision]:  # fmt: skip
    """Prices of one plain step of 10 ms; a level for n sequences takes level_ms + (n - 1) * more_ms."""
    n = len(sequences)
    levels = [0.0, *(level_ms + more_ms * i for i in range(n))]
    prices = DraftPrices(PLAIN_MS / n, row_ms, levels)
    return choose_sequences(drafter, sequences, [eligible] * n, [covered] * n, [prefill_ms] * n, prices)


def serve(
    drafter: DrafterYield, one: SequenceInputs, steps: int, gain: int, level_ms: float, levels: int = 2
) -> list[DraftDecision]:
    """Return the decisions of ``steps`` steps in which the drafter adds ``gain`` tokens whenever it runs."""
    decisions = []
    for _ in range(steps):
        (decision,) = decide(drafter, [one], level_ms)
        decisions.append(decision)
        if decision != "off":
            drafter.observe(one, gain, levels, 0)
        drafter.end_step([one], [decision != "off"])
    return decisions


def knows(drafter: DrafterYield, one: SequenceInputs, tokens: float, levels: float, rows: float = 0.0) -> None:
    """Record many observations of the drafter: what one step gains on average."""
    drafter.pools[0] = DraftRecord(200.0, 200 * tokens, 200 * levels, 200 * rows)
    one.history.records["m"] = DraftRecord(20.0, 20 * tokens, 20 * levels, 20 * rows)


def test_a_drafter_that_pays_stays_enabled() -> None:
    assert set(serve(make_yield(), make_one(), 100, gain=2, level_ms=2.0)) == {"on"}


def test_a_drafter_that_does_not_pay_is_disabled_and_probed_rarely() -> None:
    decisions = serve(make_yield(), make_one(), 600, gain=0, level_ms=4.0)
    assert decisions[0] == "on"
    assert "on" not in decisions[30:]
    assert 0 < decisions[200:].count("probe") * 2 * 4.0 < 0.02 * 400 * PLAIN_MS


def test_a_drafter_too_expensive_for_any_gain_never_starts() -> None:
    assert serve(make_yield(), make_one(), 50, gain=3, level_ms=50.0) == ["off"] * 50


def test_an_untried_drafter_with_a_possible_gain_is_tried() -> None:
    """Half a step lost in the mean, for a drafter that may bring three tokens as well as none."""
    assert decide(make_yield(), [make_one()], 6.5) == ["probe"]
    known = make_yield()
    one = make_one()
    knows(known, one, *PRIOR)
    assert decide(known, [one], 6.5) == ["off"]


def test_a_drafter_that_pays_again_is_enabled_again() -> None:
    drafter, one = make_yield(), make_one()
    assert serve(drafter, one, 400, gain=0, level_ms=2.0)[-20:].count("on") == 0
    assert set(serve(drafter, one, 200, gain=3, level_ms=2.0)[-100:]) == {"on"}


def test_a_long_text_is_prefilled_if_the_remaining_tokens_pay_for_it() -> None:
    def decision(prefill_ms: float, room: int = 1000) -> str:
        return decide(make_yield(), [make_one(room=room)], 1.0, prefill_ms=prefill_ms)[0]

    assert decision(0.0) == decision(50.0) == "on"
    assert decision(4000.0) == "off"
    assert decision(50.0, room=8) == "off"  # the request ends before it pays


def test_a_long_text_is_prefilled_to_learn_for_future_requests() -> None:
    """It takes a little longer to read than this answer is thought to win back."""
    untried, known, one = make_yield(), make_yield(), make_one()
    knows(known, one, *PRIOR)
    one.history.records.clear()
    assert decide(untried, [make_one()], 1.0, prefill_ms=200.0) == ["probe"]
    assert decide(known, [one], 1.0, prefill_ms=200.0) == ["off"]


@pytest.mark.parametrize("prefill_ms", [200.0, 400.0, 1000.0])
def test_a_long_text_is_prefilled_once_as_much_was_emitted_as_wins_it_back(prefill_ms: float) -> None:
    """An answer may be short: then a long text read for it would take longer than the answer."""
    drafter, one, other = make_yield(), make_one(room=4000), make_one()
    knows(drafter, other, *PRIOR)
    saved_ms = (PLAIN_MS * PRIOR[0] - PRIOR[1]) / (1 + PRIOR[0])  # of a token
    while decide(drafter, [one], 1.0, prefill_ms=prefill_ms) != ["on"]:
        one.emitted += 1
    assert one.emitted == pytest.approx(prefill_ms / saved_ms, abs=2)


def test_the_whole_text_is_read_once_it_would_have_paid_on_the_answer_so_far() -> None:
    """A step of 2.5 tokens gains 0.15 more if the whole text is read, each worth 10 ms: 0.6 ms a token."""
    drafter, one = make_yield(), make_one()
    knows(drafter, make_one(), *PRIOR)
    found = []
    for saved_ms in (-1.0, 0.0, 30.0, 300.0):
        one.emitted = 0
        while reads_end_alone(drafter, one, saved_ms, PLAIN_MS):
            one.emitted += 1
        found.append(one.emitted)
    assert found == [0, 0, 50, 500]


def test_sequences_share_the_cost_of_a_level() -> None:
    """A level costs 12 ms for any number of sequences: too much for one, but not for four of a step of 40 ms."""
    drafter, sequences = make_yield(), [make_one(i) for i in range(4)]
    for one in sequences:
        knows(drafter, one, 1.5, 2.0)
    prices = DraftPrices(10.0, 0.0, [0.0, 12.0, 12.0, 12.0, 12.0])
    assert choose_sequences(drafter, sequences[:1], [True], [0.0], [0.0], prices) == ["off"]
    assert choose_sequences(drafter, sequences, [True] * 4, [0.0] * 4, [0.0] * 4, prices) == ["on"] * 4


def test_a_batch_probes_what_one_sequence_could_not_afford() -> None:
    drafter, sequences = make_yield(), [make_one(i) for i in range(8)]
    drafter.pools[0] = DraftRecord(8.0, 0.8 * 8, 1.0 * 8, 0.0)
    prices = DraftPrices(10.0, 0.0, [0.0, *[72.0] * 8])
    assert choose_sequences(drafter, sequences, [True] * 8, [0.0] * 8, [0.0] * 8, prices) == ["probe"] * 8
    assert choose_sequences(drafter, sequences[:1], [True], [0.0], [0.0], prices) == ["off"]


def test_one_sequence_is_no_joint_trial() -> None:
    """It is known to gain nothing, and the drafter's average hardly pays: others would have to share the trial."""
    drafter, one = make_yield(), make_one()
    drafter.pools[0] = DraftRecord(34.0, 34 * 1.43, 34 * 3, 34 * 3)
    one.history.records["m"] = DraftRecord(19.0, 0.0, 19 * 3, 19 * 3)
    assert decide(drafter, [one], 4.83) == ["off"]


def test_sequences_that_do_not_pay_are_excluded_from_a_batch() -> None:
    drafter, sequences = make_yield(), [make_one(i) for i in range(3)]
    for one, tokens in zip(sequences, (6.0, 0.0, 6.0), strict=True):
        knows(drafter, one, tokens, 2.0)
    drafter.pools[0] = DraftRecord(200.0, 400.0, 400.0, 0.0)
    assert decide(drafter, sequences, 3.0, more_ms=3.0) == ["on", "off", "on"]


def test_tokens_covered_by_other_drafters_add_no_gain() -> None:
    drafter, one = make_yield(), make_one()
    knows(drafter, one, 1.5, 3.0)
    assert decide(drafter, [one], 3.0, covered=0.0) == ["on"]
    assert decide(drafter, [one], 3.0, covered=0.9) == ["off"]


def test_rows_to_verify_are_part_of_the_cost() -> None:
    drafter, one = make_yield(), make_one()
    knows(drafter, one, 1.5, 3.0, 1.0)
    assert decide(drafter, [one], 3.0) == ["on"]
    assert decide(drafter, [one], 3.0, row_ms=9.0) == ["off"]


def test_a_sequence_about_to_end_is_not_probed() -> None:
    assert decide(make_yield(), [make_one(room=8)], 6.5) == ["off"]


def test_forced_sequences_always_draft_and_others_share_their_level() -> None:
    drafter, forced, other = make_yield(), make_one(1, forced=True), make_one(2)
    for one in (forced, other):
        knows(drafter, one, 1.0, 2.0)
    prices = DraftPrices(10.0, 0.0, [0.0, 7.0, 7.0])
    assert choose_sequences(drafter, [other], [True], [0.0], [0.0], prices) == ["off"]
    assert choose_sequences(drafter, [forced, other], [True] * 2, [0.9, 0.0], [0.0] * 2, prices) == ["forced", "on"]


def test_ineligible_drafters_do_not_run() -> None:
    assert decide(make_yield(), [make_one()], 1.0, eligible=False) == [""]


def test_new_sequences_start_from_observations_at_their_temperature() -> None:
    drafter = make_yield()
    for key in range(60):
        serve(drafter, make_one(key), 10, gain=0, level_ms=4.0)
    assert decide(drafter, [make_one(100)], 4.0) == ["off"]
    warm = make_one(101)
    warm.history.bucket = 2
    assert decide(drafter, [warm], 4.0) == ["on"]


@pytest.mark.parametrize("level_ms", [4.2, 4.6, 4.9, 5.0, 5.1])
def test_near_the_threshold_little_is_lost(level_ms: float) -> None:
    """Gains of 1 and 0 in turn are worth 0.5 tokens, 5 ms of plain decode, a level; levels cost about that."""
    drafter, one, lost, gain = make_yield(), make_one(), 0.0, 0
    for _ in range(2000):
        (decision,) = decide(drafter, [one], level_ms)
        if decision != "off":
            gain = 1 - gain
            drafter.observe(one, gain, 1, 0)
            lost += level_ms - gain * PLAIN_MS
        drafter.end_step([one], [decision != "off"])
    assert lost <= 0.01 * 2000 * PLAIN_MS
