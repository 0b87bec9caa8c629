"""Plans that a running server does not support are rejected with the line and the reason."""

from __future__ import annotations

from typing import Any

import pytest

from server.experiment.arm_options import UNTOUCHED
from server.experiment.config import parse_config, refuse
from server.experiment.live.plan import LivePlan, make_plan
from server.experiment.records import PlanError
from specdec.core.types import Request, SpeculationMode, SpeculationParams
from tests.fake_engine import INFO

PLAN = """\
name: widths
arms:
  one:
    request: {}
  two:
    request:
      speculation: {width: 2}
assignment:
  mode: hash
"""


def made(text: str) -> LivePlan:
    plan, problems = make_plan(parse_config(text, "plan"), INFO)
    refuse(text, "plan", problems)
    return plan


def with_request(options: str, mode: str = "hash") -> str:
    return PLAN.replace("{width: 2}", "{width: 2}\n      " + options).replace("mode: hash", f"mode: {mode}")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (PLAN.replace("width", "breadth"), 7, "arms.two.request.speculation.breadth: an arm cannot change it"),
        (with_request("temperature: 0"), 8, "arms.two.request.temperature: an arm cannot change it"),
        (PLAN.replace("width: 2", "width: 99"), 7, "arms.two.request.speculation.width: must lie in 1..16"),
        (PLAN.replace("width: 2", "width: wide"), 7, "speculation.width: must be a whole number"),
        (PLAN.replace("width: 2", "mode: sometimes"), 7, "speculation.mode: must be one of auto, off, on"),
        (PLAN.replace("width: 2", "drafters: [oracle]"), 7, "unknown oracle; loaded: suffix"),
        (with_request("target_tpot_ms: -1"), 8, "target_tpot_ms: must be a positive number"),
        (with_request("priority: high"), 8, "priority: must be a whole number"),
        (PLAN.replace("mode: hash", "mode: paired_replay"), 9, "paired_replay is for `specdec ab run`"),
        (PLAN.replace("    request: {}", "    url: http://other"), 4, "specdec ab run PLAN --a URL --b URL"),
        (PLAN.replace("    request: {}", "    engine: {draft: small}"), 2, "use switchback"),
        (PLAN.replace("request: {}", "engine: {max_batch: 4}"), 4, "arms.one.engine.max_batch: cannot switch"),
        (PLAN.replace("request: {}", "engine: {draft_dtype: int8}"), 4, "no meaning without `draft`"),
        (PLAN.replace("request: {}", "engine: {draft: [a]}"), 4, "must name a model"),
        (PLAN.replace("request: {}", "engine: {flush_cache: 1}"), 4, "must be true or false"),
        (
            PLAN.replace("request: {}", "engine: {draft: small}").replace("hash", "switchback"), 2,
            "draft is in one arm only",
        ),
        (PLAN.replace("request: {}", "weight: 2").replace("hash", "switchback"), 2, "leave weight out"),
        (PLAN.replace("mode: hash", "mode: switchback\n  share: 10%"), 10, "no effect in mode switchback; hash"),
        (PLAN.replace("mode: hash", "mode: paired_replay\n  unit: user"), 10, "no effect in mode paired_replay; hash"),
        (PLAN.replace("{width: 2}", "{}"), 2, "both arms are the same"),
        (PLAN.replace("mode: hash", "mode: other"), 9, "Input should be 'paired_replay'"),
        (PLAN.replace("  two:", "  two,three:"), 5, "must be a name of letters"),
        ("name: a\nwhat: b\narms: {}\n", 2, "no such field"),
        ("name: [", 1, "not valid YAML"),
        ("name: &a [*a]", 1, ""),
        ("- 1", 1, "must be a mapping"),
    ],
)  # fmt: skip
def test_invalid_plans(text: str, line: int, reason: str) -> None:
    with pytest.raises(PlanError) as caught:
        made(text)
    assert reason in str(caught.value)
    if reason not in ("", "must be a mapping"):
        assert f"line {line}" in str(caught.value)


def test_every_problem_is_named_together() -> None:
    text = PLAN.replace("request: {}", "request: {speed: 1}").replace("width: 2", "width: 0")
    with pytest.raises(PlanError) as caught:
        made(text)
    assert len(caught.value.problems) == 2


def test_arms_change_only_the_fields_they_name() -> None:
    plan = made(with_request("priority: 4\n      target_tpot_ms: 20\n      cache_salt: b"))
    request = Request(request_id="x", prompt_ids=(1, 2, 3), session="s", speculation=SpeculationParams(max_depth=3))
    changed = plan.options["two"].put(request)
    assert changed == Request(
        request_id="x", prompt_ids=(1, 2, 3), session="s", priority=4, target_tpot_ms=20.0, cache_salt="b",
        speculation=SpeculationParams(max_depth=3, width=2),
    )  # fmt: skip
    assert plan.options["one"].put(request) is request


@pytest.mark.parametrize(
    ("spelled", "mode"),
    [("off", "off"), ("on", "on"), ("auto", "auto"), ("{mode: off}", "off"), ("{mode: MODE_ON}", "on")],
)
def test_modes_may_be_abbreviated_and_yaml_may_parse_them_as_booleans(spelled: str, mode: str) -> None:
    plan = made(PLAN.replace("{width: 2}", spelled).replace("request: {}", "request: {priority: 1}"))
    assert plan.options["two"].put(UNTOUCHED).speculation.mode is SpeculationMode(mode)


def test_a_request_with_its_own_setting_is_unchanged_in_either_arm() -> None:
    plan = made(with_request("priority: 4"))
    assert plan.names == {"speculation.width", "priority"}

    def free(**fields: Any) -> bool:
        return plan.leaves_free(Request(request_id="x", prompt_ids=(1,), **fields))

    assert free()
    assert free(speculation=SpeculationParams(max_depth=2), session="s", cache_salt="z")
    assert not free(priority=1)
    assert not free(speculation=SpeculationParams(width=2))  # though an arm would set the same value


def test_a_live_aa_is_by_request_and_one_with_pairs_is_not() -> None:
    text = "name: n\narms: {a: {}, b: {}}\nassignment: {mode: aa}\n"
    assert made(text).config.assignment.unit == "request"
    assert not made(text).config.assignment.pairs
    assert parse_config(text, "plan").assignment.pairs


def test_bug_a_switchback_may_have_equal_arms() -> None:
    plan = made(PLAN.replace("{width: 2}", "{}").replace("hash", "switchback"))
    assert (plan.changes, plan.switches_engine) == (frozenset(), False)


def test_engine_settings_are_switched_in_both_arms() -> None:
    text = (
        "name: n\narms:\n  a: {engine: {draft: null, flush_cache: true}}\n"
        "  b: {engine: {draft: small, draft_dtype: int8, flush_cache: true}}\n"
        "assignment: {mode: switchback, block_s: 10, washout_s: 1}\n"
    )
    plan = made(text)
    assert plan.switches_engine
    assert "both must fit in memory" in plan.warnings[0]
    assert plan.changes == {"engine.draft", "engine.flush_cache"}
    assert (plan.settings["b"].draft, plan.settings["b"].draft_dtype) == ("small", "int8")
