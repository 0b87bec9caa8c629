"""Verdicts from records: what they are, and what does not mislead them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from server.experiment.analysis.analyse import analyse, decide
from server.experiment.analysis.result import GuardrailResult, Result, TargetResult, VerdictKind, exit_code
from server.experiment.records import METRICS, ExperimentError, Record, RecordLog
from server.experiment.report.render import render
from server.experiment.stats.proportions import holm
from server.experiment.stats.quantiles import band_half_width
from server.experiment.stats.samples import ANY_RATIO, Interval
from tests.server.experiment.simulated import make_record, manifest, paired, switchback

OPEN_GUARDRAILS = [{"metric": "error_rate", "max_increase": "50%"}]
PLAN = manifest().config


def test_a_large_gain_is_better_and_the_same_records_give_the_same_result() -> None:
    plan = manifest(secondary=["ttft_ms@p95", "tpot_ms:mean", "tokens_per_step:mean"])
    log = paired(plan, 120, 0.7, seed=1)
    result = analyse(plan, log)
    assert result.verdict.kind == "better"
    assert re.fullmatch(
        r"Better: auto answers \d+\.\d% sooner in the median; 95% interval \d+\.\d% to \d+\.\d%\.",
        result.verdict.headline,
    )
    assert result == analyse(plan, log)
    assert (result.compared_outputs, result.mismatched_outputs) == (120, 0)
    steps = result.secondary[2]
    assert steps.b is not None
    assert not steps.lower_is_better
    assert steps.b > 2
    raw = [t.p_value for t in result.secondary]
    assert [t.p_adjusted for t in result.secondary] == pytest.approx(holm(raw))
    smallest = min(result.secondary, key=lambda t: t.p_value)  # is three times as hard to believe
    assert smallest.p_adjusted is not None
    assert smallest.p_adjusted == pytest.approx(min(1.0, 3 * smallest.p_value))
    assert 0 < smallest.p_value < smallest.p_adjusted
    assert Result.model_validate_json(result.model_dump_json()) == result


def test_bug_a_fixed_rule_concludes_nothing_before_the_end() -> None:
    plan = manifest(stopping={"rule": "fixed"}, guardrails=[{"metric": "error_rate", "max_increase": 0.1}])
    log = paired(plan, 200, 0.7, seed=1)
    assert analyse(plan, log).verdict.kind == "better"
    early = analyse(plan, log, ended=False).verdict
    assert (early.kind, "has not ended" in early.headline) == ("undecided", True)
    assert early.reasons == analyse(plan, log).verdict.reasons
    always = manifest(stopping={"rule": "always_valid", "expected_units": 200})
    assert analyse(always, paired(always, 200, 0.3, seed=1), ended=False).verdict.kind == "better"
    other = replace(log.records[0], token_hash=b"other")
    assert analyse(plan, RecordLog([other, *log.records[1:]]), ended=False).verdict.kind == "invalid"


def test_bug_what_is_missing_is_named_by_the_unit_that_counts() -> None:
    """Requests are plenty, blocks are few."""
    plan = manifest(assignment={"mode": "switchback"}, stopping={"rule": "always_valid"})
    few, more = (analyse(plan, switchback(plan, blocks, 200, 1.0, seed=1)).verdict for blocks in (6, 20))
    assert few.headline == "Undecided: there are too few blocks, 3 of at least 8 in each arm."
    assert more.headline.endswith("; more blocks narrow it.")
    assert "there are too few blocks to bound their ratio" in more.reasons[0]


def test_exchanged_arms_exchange_the_verdict() -> None:
    plan = manifest(primary={"metric": "tokens_per_s", "quantile": 0.5})
    log = paired(plan, 120, 0.7, seed=1)
    assert analyse(plan, log).verdict.kind == "better"
    other = {"off": "auto", "auto": "off"}
    swapped = RecordLog([replace(r, arm=other[r.arm]) for r in log.records])
    assert analyse(plan, swapped).verdict.kind == "worse"


def test_equal_arms_are_equivalent_with_enough_data_and_undecided_with_little() -> None:
    plan = manifest(primary={"metric": "e2e_ms", "quantile": 0.5, "min_effect": "10%"}, guardrails=OPEN_GUARDRAILS)
    assert analyse(plan, paired(plan, 300, 1.0, seed=2, noise=0.05)).verdict.kind == "equivalent"
    assert analyse(plan, paired(plan, 20, 1.0, seed=2)).verdict.kind == "undecided"
    assert "too few" in analyse(plan, paired(plan, 5, 0.5, seed=2)).verdict.headline


def test_one_token_mismatch_invalidates_everything() -> None:
    plan = manifest()
    log = paired(plan, 60, 0.7, seed=3)
    log.records[7] = replace(log.records[7], token_hash=b"other")
    result = analyse(plan, log)
    assert result.verdict.kind == "invalid"
    assert "1 of 60 pairs got different tokens" in result.verdict.headline
    assert log.records[7].pair in result.verdict.headline
    sampled = manifest(assignment={"expect_same_tokens": False})
    assert analyse(sampled, log).verdict.kind == "better"


def test_missing_records_or_a_lagging_generator_invalidate_the_result() -> None:
    plan = manifest(arms={"off": {}, "auto": {}}, assignment={"mode": "hash"})
    log = paired(plan, 200, 1.0, seed=4)
    lossy = RecordLog([r for i, r in enumerate(log.records) if r.arm == "off" or i % 3])
    assert "arms' shares differ from the plan" in analyse(plan, lossy).verdict.headline
    late = RecordLog([replace(r, scheduled=r.arrival - 0.05) for r in log.records])
    assert "lagged" in analyse(plan, late).verdict.headline
    assert analyse(plan, log).verdict.kind != "invalid"


@pytest.mark.parametrize("rule", ["fixed", "always_valid"])
def test_shares_are_checked_before_the_first_requests_are_excluded(rule: str) -> None:
    weights: dict[str, Any] = {"off": {"weight": 9}, "auto": {"weight": 1}}
    plan = manifest(arms=weights, assignment={"mode": "hash"}, warmup_requests=50, stopping={"rule": rule})
    log = paired(plan, 1000, 1.0, seed=12)
    log.records = [r for i, r in enumerate(log.records) if (r.arm == "auto") == (i // 2 % 10 == 0)]
    result = analyse(plan, log)
    assert result.sample_ratio_counts == (900, 100)
    assert [arm.requests for arm in result.arms] == [850, 50]
    assert result.verdict.kind != "invalid"


@pytest.mark.parametrize("rule", ["fixed", "always_valid"])
def test_bug_requests_that_callers_cancel_are_no_failures(rule: str) -> None:
    plan = manifest(arms={"off": {}, "auto": {}}, assignment={"mode": "hash"}, stopping={"rule": rule})
    log = paired(plan, 2000, 1.0, seed=5)
    log.records = [replace(r, status="cancelled") if i % 20 < 8 else r for i, r in enumerate(log.records)]
    result = analyse(plan, log)
    guarded = {guardrail.label: guardrail for guardrail in result.guardrails}["error_rate"]
    assert guarded.state == "held"
    assert guarded.text == "0 of 1200 requests failed in the control, 0 of 1200 in the treatment"
    assert [(arm.requests, arm.failed, arm.reasons) for arm in result.arms] == [(2000, 0, {})] * 2
    assert any("cancelled, no failures: 800 in the control, 800 in the treatment" in note for note in result.notes)
    log.records = [replace(r, status="cancelled" if r.arm == "off" else "FAILED") for r in log.records]
    assert {guardrail.state for guardrail in analyse(plan, log).guardrails} == {"open"}


def test_errors_and_queues_are_guarded_whatever_the_gain() -> None:
    plan = manifest()
    log = paired(plan, 150, 0.7, seed=5)
    failing = [
        replace(r, status="UNAVAILABLE") if r.arm == "auto" and i % 6 == 0 else r for i, r in enumerate(log.records)
    ]
    result = analyse(plan, RecordLog(failing))
    assert result.verdict.kind == "worse"
    assert "error_rate" in result.verdict.headline
    assert result.arms[1].reasons == {"UNAVAILABLE": result.arms[1].failed}
    assert any("because a request failed" in note for note in result.notes)
    median = manifest(guardrails=[{"metric": "queue_ms@p50", "max_increase": "10%"}])
    queued = [replace(r, started=r.arrival + (0.02 if r.arm == "auto" else 0.01)) for r in log.records]
    assert "queue_ms@p50" in analyse(median, RecordLog(queued)).verdict.headline
    # twice of next to nothing is still nothing
    tiny = [replace(r, started=r.arrival + (2e-5 if r.arm == "auto" else 1e-5)) for r in log.records]
    assert analyse(median, RecordLog(tiny)).verdict.kind == "better"


def test_bug_a_guardrail_says_that_a_fall_of_speed_is_for_the_worse() -> None:
    limit = {"metric": "tokens_per_s@p50", "max_increase": "10%"}
    plan = manifest(guardrails=[limit])
    for factor, says in ((1.5, "is broken: it got worse by more than the limit of 10% (+"), (1.11, "is open: ")):
        result = analyse(plan, paired(plan, 60, factor, seed=3))
        assert says in result.verdict.reasons[1]
        assert "rise" not in result.verdict.reasons[1]
        assert "rose" not in result.verdict.reasons[1]
        low, high = result.guardrails[0].bounds
        assert low is not None
        assert high is not None
        assert low < 1 - 1 / factor < high
        assert f"worse by {result.guardrails[0].increase:+.1%}" in render(result)


def test_bug_a_verdict_says_that_the_pairs_of_a_turn_count_as_one() -> None:
    """Of 224 pairs it said that the change lies between -100.0% and unknown, and that more pairs narrow it."""
    plan = manifest(load={"workload": "chat", "concurrency": 32}, guardrails=[])
    verdict = analyse(plan, paired(plan, 7 * 32, 0.5, seed=1)).verdict
    assert verdict.headline.endswith("; more pairs narrow it, of which 32 in a row count as one.")
    assert analyse(plan, paired(plan, 8 * 32, 0.5, seed=1)).verdict.kind == "better"


def test_bug_small_levels_margins_and_limits_are_not_rounded_to_nothing() -> None:
    plan = manifest(
        primary={"metric": "e2e_ms@p50", "min_effect": 0.0004},
        guardrails=[{"metric": "error_rate", "max_increase": 0.0002}],
        stopping={"alpha": 0.001},
    )
    log = paired(plan, 60, 1.0, seed=3)
    same = RecordLog([replace(r, end=r.arrival + 1.0) for r in log.records])
    for each, says in ((log, "(99.9% interval)"), (same, "differs by less than 0.04%")):
        result = analyse(plan, each)
        assert says in result.verdict.headline
        assert " at 99.9%" in result.verdict.reasons[0]
        assert "worse by more than 0.02% (" in result.verdict.reasons[1]
        assert "99.9% intervals" in (page := render(result))
        assert ">0.02%<" in page


def test_bug_a_verdict_beside_a_control_of_0_says_what_was_measured() -> None:
    """As where one arm flushes the prefix cache."""
    log = paired(manifest(), 40, 1.0, seed=5)
    cached = RecordLog([replace(r, cached_tokens=64 if r.arm == "auto" else 0) for r in log.records])
    for primary, kind in (("cached_tokens@p50", "better"), ("cached_tokens:mean", "undecided")):
        verdict = analyse(manifest(primary=primary, guardrails=OPEN_GUARDRAILS), cached).verdict
        assert verdict.kind == kind
        assert verdict.headline == (
            f"{kind.capitalize()}: {primary} is 0 in the control and 64 in auto, so their ratio is not defined."
        )
        assert verdict.reasons[0] == f"{primary}: control 0, treatment 64; their ratio is not defined."


def test_bug_the_queue_is_not_guarded_where_no_answer_tells_it() -> None:
    arms = {"ours": {"url": "grpc://a:1"}, "theirs": {"url": "http://b:1/v1"}}
    plan, other = (
        manifest(arms=arms),
        manifest(arms=arms, guardrails=[{"metric": "queue_ms@p50", "max_increase": "5%"}]),
    )
    log = paired(plan, 30, 0.7, seed=5)
    told = RecordLog([replace(r, started=None) if r.arm == "theirs" else r for r in log.records])
    found = analyse(plan, told)
    assert [guardrail.label for guardrail in found.guardrails] == ["error_rate"]
    assert any("queue_ms@p95 was not checked" in note for note in found.notes)
    found = analyse(other, told)  # the plan asks for it
    assert [(guardrail.label, guardrail.state) for guardrail in found.guardrails] == [("queue_ms@p50", "open")]
    assert len(analyse(manifest(), paired(manifest(), 30, 0.7, seed=5)).guardrails) == 2


def test_blocks_are_the_units_of_a_switchback() -> None:
    plan = manifest(assignment={"mode": "switchback"}, guardrails=OPEN_GUARDRAILS)
    log = switchback(plan, 40, 25, 0.8, seed=6)
    result = analyse(plan, log)
    assert result.verdict.kind == "better"
    assert result.primary.units == 20
    assert result.sample_ratio_unit == "block"
    low, high = result.primary.ratio_bounds
    alone = analyse(
        manifest(assignment={"mode": "hash"}, arms={"off": {}, "auto": {}}, guardrails=OPEN_GUARDRAILS), log
    )
    assert low is not None
    assert high is not None
    assert alone.primary.ratio_bounds[0] is not None
    assert alone.primary.ratio_bounds[1] is not None
    # treating requests as independent would overstate the evidence
    assert high - low > 1.3 * (alone.primary.ratio_bounds[1] - alone.primary.ratio_bounds[0])


def test_warm_up_is_excluded_and_reported() -> None:
    plan = manifest(warmup_requests=10)
    log = paired(plan, 60, 1.0, seed=7)
    log.records[30] = replace(log.records[30], warm_up=True)
    log.lost_bytes = 17
    result = analyse(plan, log)
    assert [arm.requests for arm in result.arms] == [49, 49]  # also without the pair of the one in the warm-up
    notes = " ".join(result.notes)
    alone = "pairs without the other request: 1"
    for part in ("warm-up: 21", alone, "17 bytes"):
        assert part in notes


def test_answers_without_the_metric_are_counted() -> None:
    plan = manifest(primary="tpot_ms@p50", secondary=["ttft_ms@p50"])
    log = paired(plan, 20, 1.0, seed=8)
    log.records = [replace(r, first_token=None) if r.pair in ("p3", "p4") else r for r in log.records]
    result = analyse(plan, log)
    assert result.primary.sizes == (18, 18)
    for metric in ("tpot_ms", "ttft_ms"):
        note = f"answers without {metric}, such as those without text or counted tokens: 2 in the control, 2 in the "
        note += "treatment"
        assert note in result.notes
    assert not any("e2e_ms" in note for note in result.notes)


def test_long_times_have_no_exponent() -> None:
    plan = manifest(guardrails=[{"metric": "ttft_ms@p50", "max_increase": 0.1}])
    log = paired(plan, 40, 1.0, seed=8)
    log.records = [replace(r, first_token=r.arrival + 12.3456, end=r.arrival + 23.4567) for r in log.records]
    result = analyse(plan, log)
    assert "control 23457 ms, treatment 23457 ms" in result.verdict.reasons[0]
    assert result.guardrails[0].text == "12346 ms in the control, 12346 ms in the treatment"


def test_an_arm_without_records_is_rejected() -> None:
    plan = manifest()
    log = RecordLog([r for r in paired(plan, 20, 1.0, seed=8).records if r.arm == "off"])
    with pytest.raises(ExperimentError, match="arm 'auto' has no record"):
        analyse(plan, log)
    alone = RecordLog([replace(r, pair="") for r in paired(plan, 20, 1.0, seed=8).records])
    with pytest.raises(ExperimentError, match="has no pair, which paired_replay needs"):
        analyse(plan, alone)


def test_the_always_valid_verdict_is_more_conservative_and_marked() -> None:
    fixed = manifest(guardrails=OPEN_GUARDRAILS)
    always = manifest(stopping={"rule": "always_valid", "expected_units": 200}, guardrails=OPEN_GUARDRAILS)
    log = paired(fixed, 200, 0.5, seed=9)
    one, two = analyse(fixed, log), analyse(always, log)
    assert one.verdict.kind == two.verdict.kind == "better"
    assert None not in (*one.decided_by, *two.decided_by)
    assert two.decided_by[1] > one.decided_by[1]  # type: ignore[operator]
    assert any("valid at any time" in note for note in two.notes)


def test_a_drift_between_pairs_is_detected_and_reported() -> None:
    plan = manifest(guardrails=OPEN_GUARDRAILS)
    log = paired(plan, 200, 1.0, seed=10, noise=0.02)
    rng = np.random.default_rng(11)
    state = np.cumsum(rng.normal(0, 0.2, 400)) * 0.2
    drifting = [
        replace(r, end=r.arrival + (r.end - r.arrival) * float(np.exp(state[i // 2] * (1 if r.arm == "auto" else -1))))
        for i, r in enumerate(log.records)
        if r.end is not None
    ]
    result = analyse(plan, RecordLog(drifting))
    assert result.primary.merged > 3
    assert result.curves.bands == (pytest.approx(band_half_width(-(-200 // result.primary.merged), 0.05)),) * 2
    assert any("correlated" in note for note in result.notes)


def _target(lower_is_better: bool = True, units: int = 50) -> TargetResult:
    nothing = (None, None)
    return TargetResult(
        label="e2e_ms@p50", title="", unit="ms", lower_is_better=lower_is_better, sizes=(50, 50), a=1.0, b=1.0,
        a_bounds=nothing, b_bounds=nothing, ratio=1.0, ratio_bounds=nothing, difference=0.0, difference_bounds=nothing,
        p_value=1.0, units=units,
    )  # fmt: skip


def _guardrail(state: str) -> GuardrailResult:
    return GuardrailResult.model_validate(
        {"label": "error_rate", "state": state, "limit": 0.01, "increase": 0.0, "bounds": (0, 1), "text": "t"}
    )


@pytest.mark.parametrize(
    ("interval", "lower_is_better", "kind"),
    [
        ((0.90, 0.99), True, "better"),
        ((0.90, 0.99), False, "worse"),
        ((1.01, 1.20), True, "worse"),
        ((1.01, 1.20), False, "better"),
        ((0.99, 1.01), True, "equivalent"),
        ((0.985, 0.995), True, "equivalent"),
        ((0.97, 1.01), True, "undecided"),
        ((0.0, float("inf")), True, "undecided"),
    ],
)
def test_verdict_of_an_interval(interval: tuple[float, float], lower_is_better: bool, kind: str) -> None:
    found = decide(_target(lower_is_better), lambda alpha: Interval(*interval), PLAN, [], [], "unit")
    assert found.kind == kind


def test_validity_overrides_guardrails_which_override_the_metric() -> None:
    def ratio(alpha: float) -> Interval:
        return Interval(0.8, 0.9)

    held, open_, broken = map(_guardrail, ("held", "open", "broken"))
    assert decide(_target(), ratio, PLAN, ["a reason"], [broken], "unit").kind == "invalid"
    assert decide(_target(), ratio, PLAN, [], [held, broken], "unit").kind == "worse"
    found = decide(_target(), ratio, PLAN, [], [held, open_], "unit")
    assert found.kind == "better"
    assert any("is open: more requests are needed" in reason for reason in found.reasons)
    assert exit_code("better", "not-worse", [held, open_]) == exit_code("equivalent", "not-worse", [open_]) == 15
    assert exit_code("better", "none", [open_]) == exit_code("better", "better", [held]) == 0
    assert decide(_target(units=7), ratio, PLAN, [], [], "unit").kind == "undecided"


@pytest.mark.parametrize(
    ("label", "ratio", "effect"),
    [
        ("e2e_ms@p50", 0.63, "Better: auto answers 37.0% sooner in the median; 95% interval 31.0% to 42.0%."),
        ("ttft_ms@p95", 0.63, "Better: auto begins to answer 37.0% sooner at p95; 95% interval 31.0% to 42.0%."),
        ("tpot_ms:mean", 1.27, "Worse: auto takes 27.0% more time per token on average; 95% interval 20.0% to 30.0%."),
        ("tokens@p50", 1.27, "Worse: auto has tokens higher by 27.0% in the median; 95% interval 20.0% to 30.0%."),
        ("e2e_ms@p50", 1.0, "Undecided: the change of e2e_ms@p50 is between -10.0% and +12.0% (95% interval); more"),
        ("e2e_ms@p99", 2.0, "Undecided: the change of e2e_ms@p99 is between -100.0% and unknown (95% interval); more"),
    ],
)
def test_the_headline_states_the_effect_for_callers(label: str, ratio: float, effect: str) -> None:
    target = _target().model_copy(update={"label": label, "ratio": ratio})
    intervals = {0.63: Interval(0.58, 0.69), 1.27: Interval(1.2, 1.3), 1.0: Interval(0.9, 1.12), 2.0: ANY_RATIO}
    found = decide(target, lambda alpha: intervals[ratio], PLAN, [], [], "unit")
    assert found.headline.startswith(effect)
    assert not any("inf" in text for text in found.reasons)


def test_bug_the_estimate_lies_in_the_interval_that_decides() -> None:
    """One key with most of the requests: bounds that hold at any time count every key alike."""
    plans = [
        manifest(assignment={"mode": "hash", "unit": "session"}, stopping={"rule": rule}, secondary=["e2e_ms@p90"])
        for rule in ("always_valid", "fixed")
    ]
    plan = plans[0]
    rng, records = np.random.default_rng(1), []
    for key in range(600):
        arm, heavy = list(plan.config.arms)[key % 2], key == 1
        for i in range(1500 if heavy else 2):
            took = 5.0 if heavy else rng.lognormal(0, 0.1) * (0.8 if key % 2 else 1.0)
            records.append(make_record(f"{key}-{i}", arm, key + i / 2000, took, rng, key % 2, key=f"k{key}"))
    result, at_one_look = (analyse(each, RecordLog(records)) for each in plans)
    for target in (result.primary, *result.secondary):
        low, high = target.ratio_bounds
        assert low < target.ratio < high
    assert result.secondary == at_one_look.secondary
    assert result.primary.difference_bounds == (None, None)  # that of the requests
    assert result.primary.ratio_bounds == result.decided_by
    assert result.primary.ratio == pytest.approx(0.8, abs=0.05)
    assert result.decided_by == pytest.approx((0.8, 0.8), abs=0.1)
    assert re.match(r"Better: auto answers .*% sooner in the median", result.verdict.headline)


def test_exit_codes_are_the_documented_ones() -> None:
    kinds: tuple[VerdictKind, ...] = ("better", "equivalent", "worse", "undecided", "invalid")
    assert [exit_code(kind, "not-worse") for kind in kinds] == [0, 0, 10, 11, 12]
    assert [exit_code(kind, "better") for kind in kinds] == [0, 13, 10, 11, 12]
    assert [exit_code(kind, "none") for kind in kinds] == [0, 0, 0, 0, 12]


def test_metrics_match_their_names() -> None:
    record = Record(
        "r",
        "a",
        arrival=10.5,
        scheduled=10.0,
        started=11.0,
        first_token=12.0,
        end=16.0,
        tokens=5,
        accepted=(1, 0, 3),
    )
    found = {name: metric.value(record) for name, metric in METRICS.items()}
    assert found["e2e_ms"] == 6000  # from when it was meant to arrive
    assert found["ttft_ms"] == 2000
    assert found["queue_ms"] == 1000
    assert found["tpot_ms"] == 1000
    assert found["tokens_per_s"] == pytest.approx(5 / 6)
    assert found["tokens_per_step"] == 1 + 6 / 4
    uncounted = replace(record, tokens=0)  # by a server that reports no counts
    assert all(math.isnan(METRICS[name].value(uncounted)) for name in ("tokens", "tokens_per_s", "tpot_ms"))
    assert METRICS["tokens"].value(replace(uncounted, first_token=None)) == 0
    empty = Record("r", "a", arrival=1.0, tokens=1)
    assert all(METRICS[name].value(empty) != METRICS[name].value(empty) for name in ("e2e_ms", "tpot_ms", "queue_ms"))
