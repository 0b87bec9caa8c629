"""Plans that a client cannot run are refused with the field and its line."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from bench.experiment.plan import ArmServer, open_arm, read_arm, read_plan
from server.experiment.config import parse_config
from server.experiment.live.plan import make_plan
from server.experiment.records import ExperimentError
from server.experiment.stats.proportions import share_difference, share_difference_bounds
from server.experiment.stats.quantiles import compare_quantiles, quantile_ratio_bounds
from server.experiment.stats.samples import TwoArmSample
from specdec.core.types import SpeculationMode
from specdec.load.request import LoadRequest
from tests.fake_engine import INFO

GOOD = """\
name: off-or-auto
arms:
  plain: {request: {speculation: off}}
  auto:
    request:
      speculation: {mode: auto, drafters: [suffix], max_depth: 4}
      priority: 3
load: {workload: chat}
stopping: {max_requests: 40}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_a_plan(tmp_path: Path) -> None:
    config = read_plan(write(tmp_path, GOOD))
    plain, auto = (read_arm(arm.request)[0] for arm in config.arms.values())
    assert plain.options["speculation"].mode == SpeculationMode.OFF
    assert plain.fields == {"speculation": {"mode": "off"}}
    assert auto.options["priority"] == 3
    assert auto.options["speculation"].drafters == ("suffix",)
    assert auto.fields == {"speculation": {"mode": "auto", "drafters": ["suffix"], "max_depth": 4}, "priority": 3}


def test_an_arm_without_options_sends_none() -> None:
    arm = read_arm({"body": {"vendor": 1}})[0]
    assert arm.fields == {"vendor": 1}
    ask = LoadRequest("a", 4, text="x", prediction="p", session="s")
    assert arm.apply(ask) == ask


def test_a_trace_lies_beside_its_plan(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{}")
    text = GOOD.replace("workload: chat", "trace: t.jsonl")
    assert read_plan(write(tmp_path, text)).load.trace == tmp_path / "t.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("speculation: off}", "speculation: sometimes}", "line 3: arms.plain.request.speculation.mode: .*auto"),
        ("speculation: off}", "speculate: off}", "line 3: arms.plain.request.speculate: an arm cannot change it"),
        ("max_depth: 4", "max_depth: 400", "line 6: arms.auto.request.speculation.max_depth: .*63"),
        ("priority: 3", "priority: high", "line 7: arms.auto.request.priority: .*whole number"),
        ("priority: 3", "body: 3", "line 7: arms.auto.request.body: must be a mapping"),
        ("priority: 3", "body: {a: .nan}", "line 7: arms.auto.request.body: cannot be sent as JSON"),
        ("priority: 3", 'body: {a: "\\ud800"}', "line 7: arms.auto.request.body: cannot be sent as JSON"),
        ("priority: 3", "body: {a: 2026-01-02}", "line 7: arms.auto.request.body: cannot be sent as JSON"),
        ("    request:\n", "    url: ftp://x\n    request:\n", "line 5: arms.auto.url: 'ftp://x' is neither"),
        ("    request:\n", "    engine: {max_batch: 3}\n    request:\n", "line 5: arms.auto.engine: .*live"),
        ("workload: chat", "workload: chess", "line 8: load.workload: no workload 'chess'; there are humaneval"),
        ("workload: chat", "trace: none.jsonl", "line 8: load.trace: .*none.jsonl is not a file"),
        ("workload: chat", "seed: 1", "line 8: load: the load has no prompts"),
        ("workload: chat", "workload: chat, rate: 0", "line 8: load.rate: .*greater than 0"),
        ("workload: chat", "workload: chat, trace: t", "line 8: load: .*one of them"),
        ("workload: chat", "workload: chat, rate: 1, concurrency: 2", "line 8: load: .*closed loop"),
        ("max_requests: 40", "alpha: 0.05", "line 9: stopping: the run has no end"),
        ("stopping:", "assignment: {mode: hash}\nstopping:", "line 9: assignment.mode: hash is for the traffic"),
        (
            "stopping:",
            "assignment: {mode: switchback}\nstopping:",
            "line 9: assignment.mode: switchback .*`specdec ab start PLAN`.*`specdec bench serve --rate`.*paired",
        ),
        ("stopping:", "assignment: {share: 10%}\nstopping:", "line 9: assignment.share: has no effect in mode paired"),
        (
            "stopping:",
            "assignment: {mode: switchback, unit: user}\nstopping:",
            "line 9: assignment.unit: has no effect",
        ),
        ("arms:", "arms: 3\nbrms:", "line 2: arms"),
        ("  plain:", "  off:", "line 2: arms: .*in quotes"),
        ("  plain:", "  1:", "line 2: arms: .*in quotes"),
    ],
)
def test_what_can_not_be_run(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(ExperimentError, match=problem) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("field", ["max_tokens: 8", "fixed_length: true"])
def test_bug_a_load_says_what_has_no_effect_on_a_trace(tmp_path: Path, field: str) -> None:
    (tmp_path / "t.jsonl").write_text("{}")
    text = GOOD.replace("workload: chat", f"trace: t.jsonl, {field}")
    with pytest.raises(ExperimentError, match=f"line 8: load.{field.partition(':')[0]}: has no effect on a trace"):
        read_plan(write(tmp_path, text))


async def test_bug_a_body_is_refused_over_grpc() -> None:
    side = ArmServer("grpc://127.0.0.1:1", "--url", "")
    with pytest.raises(ExperimentError, match=r"--url \(arm 'a'\): .* `body` is for http:// URLs"):
        async with open_arm("a", read_arm({"body": {"vendor": 1}})[0], side, 0.0):
            pass


def test_a_plan_for_a_running_server_is_not_asked_for_a_load(tmp_path: Path) -> None:
    text = "name: a\narms: {a: {engine: {draft: m}}, b: {engine: {draft: null}}}\nassignment: {mode: switchback}\n"
    with pytest.raises(ExperimentError) as caught:
        read_plan(write(tmp_path, text))
    assert str(caught.value).count("line ") == 1
    assert "line 3: assignment.mode: switchback is for the traffic of a running server" in str(caught.value)


def test_bug_a_share_of_pairs_is_refused(tmp_path: Path) -> None:
    text = "name: a\narms: {a: {}, b: {}}\nload: {workload: chat}\nstopping: {max_requests: 40}\n"
    assert read_plan(write(tmp_path, text + "assignment: {mode: aa}\n")).assignment.pairs
    with pytest.raises(ExperimentError, match=r"line 5: assignment.share: has no effect here"):
        read_plan(write(tmp_path, text + "assignment: {mode: aa, share: 10%}\n"))


ROOT = Path(__file__).parents[3]
LIVE = ROOT / "docs/examples/ab/switchback.yaml"
EXAMPLES = sorted({*LIVE.parent.glob("*.yaml")} - {LIVE})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_run(path: Path) -> None:
    assert read_plan(path).name == path.stem
    assert f"specdec ab run docs/examples/ab/{path.name}" in path.read_text()


def test_the_live_example_can_be_started() -> None:
    text = LIVE.read_text()
    plan, problems = make_plan(parse_config(text, LIVE.name), INFO)
    assert (plan.config.name, problems) == (LIVE.stem, [])
    assert f"specdec ab start docs/examples/ab/{LIVE.name}" in text


@pytest.mark.parametrize("path", [*EXAMPLES, LIVE], ids=lambda path: path.stem)
def test_bug_without_a_failure_an_example_holds_its_error_rate(path: Path) -> None:
    text = path.read_text()
    config = parse_config(text, path.name)
    stopping, assignment = config.stopping, config.assignment
    if stopping.max_requests is not None:
        n = stopping.max_requests // 2
    else:
        rate = re.search(r"--rate ([\d.]+)", text)
        assert rate is not None
        assert stopping.max_duration is not None
        counted = 1 - assignment.washout_s / assignment.block_s
        n = int(float(rate[1]) * stopping.max_duration / 2 * counted)
    n -= config.warmup_requests
    bounds = share_difference_bounds if stopping.rule == "always_valid" else share_difference
    (limit,) = [guardrail.max_increase for guardrail in config.guardrails if guardrail.target is None]
    assert bounds((0, 0), (n, n), stopping.alpha).high <= limit


@pytest.mark.parametrize(
    ("limit", "fixed", "always_valid"), [(0.01, 381, 1061), (0.02, 189, 490), (0.05, 73, 173), (0.1, 35, 77)]
)
def test_the_documented_numbers_are_the_fewest(limit: float, fixed: int, always_valid: int) -> None:
    row = f"| {limit * 100:.0f} % {'(default) ' if limit == 0.01 else ''}| {fixed} | {always_valid:,} |"
    assert row in (ROOT / "docs/experiments.md").read_text()
    for n, bounds in ((fixed, share_difference), (always_valid, share_difference_bounds)):
        assert bounds((0, 0), (n, n), 0.05).high <= limit < bounds((0, 0), (n - 1, n - 1), 0.05).high


@pytest.mark.parametrize(("p", "fixed", "always_valid", "turns"), [(99, 368, 572, "14,144"), (95, 72, 169, "2,912")])
def test_the_documented_numbers_for_quantiles_are_the_fewest(p: int, fixed: int, always_valid: int, turns: str) -> None:
    text = (ROOT / "docs/experiments.md").read_text()
    assert re.search(rf"`queue_ms@p{p}`\D+{fixed}\D+\({always_valid}\b", text)
    for n, bounded in ((fixed - 1, False), (fixed, True)):
        (compared,) = compare_quantiles(_equal(n), [p / 100], 2, np.random.default_rng(1))
        assert math.isfinite(compared.ratio(0.05).high) is bounded
    for n, bounded in ((always_valid - 1, False), (always_valid, True)):
        assert math.isfinite(quantile_ratio_bounds(_equal(n), p / 100, 0.05, 1000).high) is bounded
    assert turns in text
    assert "`queue_ms@p90`: 105 blocks" in text
    for n, bounded in ((104, False), (105, True)):
        assert math.isfinite(quantile_ratio_bounds(_equal(n), 0.9, 0.05, 1000).high) is bounded
    many = int(turns.replace(",", ""))
    for n, bounded in ((many - 32, False), (many, True)):
        assert math.isfinite(quantile_ratio_bounds(_equal(n).merged(32), p / 100, 0.05, 1000 / 32).high) is bounded


def _equal(n: int) -> TwoArmSample:
    ones, units = np.ones(n), np.arange(n)
    return TwoArmSample((ones, ones), (units, units), n)
