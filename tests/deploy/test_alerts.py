"""Each alert fires above its threshold and is silent below it, by Prometheus's own rule tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_promtool import DEPLOY, PROMTOOL, promtool

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: make promtool")
TARGET = 'job="specdec",instance="a:8401"'


def histogram(name: str, seconds: float) -> dict[str, str]:
    """Ten values of ``seconds`` a minute."""
    bounds = [bound for bound in (0.01, 0.05, 0.15, 0.5, 1.5, 2.5, 5.0) if bound < seconds]
    series = {f'{name}_bucket{{{TARGET},le="{bound}"}}': "0x30" for bound in bounds}
    return series | {f'{name}_bucket{{{TARGET},le="{le}"}}': "0+10x30" for le in (seconds, "+Inf")}


def series(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"{name}{{{TARGET}{labels}}}": values}


def goodput(share: int) -> dict[str, str]:
    """Of the first of two models, in percent; the other meets all."""
    found = {}
    for model, good in (("a", share), ("b", 100)):
        found |= series("specdec_requests_total", "0+100x30", f',outcome="complete",model="{model}"')
        found |= series("specdec_goodput_requests_total", f"0+{good}x30", f',model="{model}"')
    return found


def refused(reason: str, per_minute: int) -> dict[str, str]:
    calls = series("specdec_calls_total", "0+300x30", ',face="http",endpoint="/v1/completions",status="200"')
    calls |= series("specdec_calls_total", "0+300x30", ',face="grpc",endpoint="Generate",status="OK"')
    return calls | series("specdec_refusals_total", f"0+{per_minute}x30", f',reason="{reason}"')


def head(share: float, per_minute: int = 10) -> dict[str, str]:
    """Of what its card promises; a second model on the server has a draft model without a card."""
    found = {}
    for at, promised in enumerate((0.8, 0.5), 1):
        place = f',drafter="head",model="a",position="{at}"'
        found |= series("specdec_drafter_card_acceptance_ratio", f"{promised}x30", place)
        found |= series("specdec_drafter_proposed_per_position_total", f"0+{per_minute}x30", place)
        accepted = f"0+{per_minute * promised * share}x30"
        found |= series("specdec_drafter_accepted_per_position_total", accepted, place)
    for what, count in (("proposed", 100), ("accepted", 1)):  # beyond the card, and of another drafter
        for place in (',drafter="head",model="a",position="3"', ',drafter="model",model="b",position="1"'):
            found |= series(f"specdec_drafter_{what}_per_position_total", f"0+{count}x30", place)
    return found


TTFT, TPOT = "specdec_time_to_first_token_seconds", "specdec_time_per_output_token_seconds"
RESTARTS, STARTED = "specdec_engine_restarts_total", "process_start_time_seconds"
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {  # series that fire it, and series that do not
    "SpecdecDown": (series("up", "0x30"), series("up", "1x30")),
    "SpecdecEngineNotReady": (series("specdec_engine_ready", "0x30"), series("specdec_engine_ready", "0 0 1x28")),
    "SpecdecEngineRestarted": (series(RESTARTS, "0x20 1x10"), series(RESTARTS, "1x30")),
    "SpecdecEngineCrashLoop": (series(RESTARTS, "0 0+1x5 5x24"), series(RESTARTS, "0 0+1x1 1x28")),
    "SpecdecServerCrashLoop": (series(STARTED, "1+60x30"), series(STARTED, "1x5 300x25")),
    "SpecdecSlowFirstToken": (histogram(TTFT, 5.0), histogram(TTFT, 1.5)),
    "SpecdecSlowTokens": (histogram(TPOT, 0.15), histogram(TPOT, 0.05)),
    "SpecdecLowGoodput": (goodput(80), goodput(95)),
    "SpecdecLongQueue": (series("specdec_requests_waiting", "40x30"), series("specdec_requests_waiting", "20x30")),
    "SpecdecCacheFull": (series("specdec_kv_usage_ratio", "0.99x30"), series("specdec_kv_usage_ratio", "0.9x30")),
    "SpecdecStaleHead": (head(0.6), head(0.75)),
    "SpecdecErrors": (refused("INTERNAL", 60), refused("INVALID_ARGUMENT", 60) | refused("ENGINE_UNAVAILABLE", 3)),
    "SpecdecOverloaded": (refused("QUEUE_FULL", 60), refused("QUEUE_FULL", 3) | refused("RATE_LIMITED", 60)),
}


def rule_test(given: dict[str, str], firing: set[str]) -> dict[str, Any]:
    """After half an hour of ``given``, a value a minute, just ``firing`` do."""
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)]
    expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "30m", "exp_samples": expected}],
    }


def check(folder: Path, tests: list[dict[str, Any]]) -> None:
    for name in ("alerts.yml", "thresholds.yml"):
        if not (folder / name).exists():
            shutil.copy(DEPLOY / name, folder)
    unit = {"rule_files": ["thresholds.yml", "alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yml").write_text(json.dumps(unit))
    promtool("test", "rules", folder / "tests.yml")


def test_every_alert_fires_above_its_threshold_and_not_below(tmp_path: Path) -> None:
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules} == set(CASES), "CASES holds what fires each, and what does not"
    tests = []
    for alert, (loud, quiet) in CASES.items():
        tests += [rule_test(loud, {alert}), rule_test(quiet, set())]
    check(tmp_path, tests)


def test_a_threshold_is_changed_in_one_place(tmp_path: Path) -> None:
    thresholds = yaml.safe_load((DEPLOY / "thresholds.yml").read_text())
    for rule in thresholds["groups"][0]["rules"]:
        if rule["record"] == "specdec:ttft_p95_seconds:max":
            rule["expr"] = "6"
    (tmp_path / "thresholds.yml").write_text(yaml.safe_dump(thresholds))
    check(tmp_path, [rule_test(histogram(TTFT, 5.0), set()), rule_test(histogram(TPOT, 0.15), {"SpecdecSlowTokens"})])
