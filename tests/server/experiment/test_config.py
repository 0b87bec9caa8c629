"""Plans are parsed, and rejected with the line of the error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.experiment.config import ExperimentConfig, MetricTarget, parse_config
from server.experiment.folder import ExperimentFolder
from server.experiment.records import ExperimentError
from specdec.config import read_text
from specdec.errors import ConfigError
from tests.server.experiment.simulated import manifest

PLAN = """\
name: ngram-or-eagle
arms:
  control:
    request: {speculation: off}
  treatment:
    request: {speculation: auto, depth: 6}
assignment: {mode: switchback, block_s: 20s, washout_s: 500ms, salt: 7f3a}
primary: {metric: ttft_ms, quantile: 0.95, min_effect: 2%}
secondary: [tpot_ms@p50, e2e_ms@p99.9, "tokens_per_step:mean"]
guardrails:
  - {metric: error_rate, max_increase: 0.1%}
  - {metric: queue_ms@p99, max_increase: 10%}
stopping: {rule: always_valid, alpha: 0.05, max_duration: 2h}
warmup_requests: 200
"""


def read_config(path: Path) -> ExperimentConfig:
    return parse_config(read_text(path, f"{path}:"), str(path))


def test_a_plan_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(PLAN)
    config = read_config(path)
    assert tuple(config.arms) == ("control", "treatment")
    assert (config.assignment.block_s, config.assignment.washout_s) == (20.0, 0.5)
    assert config.stopping.max_duration == 7200
    assert [t.label for t in config.secondary] == ["tpot_ms@p50", "e2e_ms@p99.9", "tokens_per_step:mean"]
    assert config.secondary[1].quantile == 0.999
    assert config.guardrails[0].max_increase == 0.001
    assert config.primary.label == "ttft_ms@p95"


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("name: ngram-or-eagle", "name: a b", 1, "should match pattern"),
        ("salt: 7f3a", "sault: 7f3a", 7, "did you mean `salt`?"),
        ("metric: ttft_ms", "metric: speed", 8, "no metric 'speed'; there are e2e_ms"),
        ("min_effect: 2%", "min_effect: two%", 8, "not a percentage; write 2%"),
        ("block_s: 20s", "block_s: soon", 7, "not a duration; write 500ms"),
        ("washout_s: 500ms", "washout_s: 20", 7, "washout_s must be shorter than block_s"),
        ("tpot_ms@p50", "tpot_ms@pxx", 9, "write METRIC@pNN"),
        ("metric: queue_ms@p99", "metric: token_mismatch_rate", 12, "no metric 'token_mismatch_rate'"),
        ("alpha: 0.05", "alpha: 0.5", 13, "less than 0.5"),
        ("max_duration: 2h", "max_slip_ms: .inf", 13, "finite number"),
        ("block_s: 20s", "block_s: 1e-310", 7, "greater than or equal to 0.001"),
        ("alpha: 0.05", "expected_units: 10000000000000", 13, "less than or equal to 1000000000"),
        ("warmup_requests: 200", "load: {shape: 1e-9}", 14, "greater than or equal to 0.001"),
        ("  treatment:\n", "  treatment:\n    weight: 1e308\n", 6, "less than or equal to 1000000000"),
        ("block_s: 20s", "block_s: .inf", 7, "finite number"),
        ("max_increase: 10%", "max_increase: .inf", 12, "finite number"),
        ("warmup_requests: 200", "load: {max_tokens: 4294967296}", 14, "less than or equal to 4294967295"),
        ("  treatment:\n    request: {speculation: auto, depth: 6}\n", "", 2, "at least 2 items"),
        ("  treatment:", "  control:", 5, "`control` is given twice"),
        ("switchback", "aa", 2, "mode aa compares an arm with itself"),
        ("rule: always_valid", "rule: [", 13, "not valid YAML"),
    ],
)
def test_a_bad_plan_is_rejected_with_its_line(tmp_path: Path, old: str, new: str, line: int, reason: str) -> None:
    assert old in PLAN
    path = tmp_path / "experiment.yaml"
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(ExperimentError) as caught:
        read_config(path)
    assert reason in str(caught.value)
    assert "Value error" not in str(caught.value)
    if "aa" not in new:
        assert f"line {line}" in str(caught.value)


def test_weights_of_pairs_missing_files_and_other_texts_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("name: a\narms: {a: {weight: 2}, b: {weight: 1}}\n")
    with pytest.raises(ExperimentError, match="leave weight out"):
        read_config(path)
    path.write_text("name: a\narms: {a: {weight: 2}, b: {}}\nassignment: {mode: switchback}\n")
    with pytest.raises(ExperimentError, match=r"line 2: arms: .*leave weight out"):
        read_config(path)
    path.write_text("- a\n")
    with pytest.raises(ExperimentError, match="must be a mapping"):
        read_config(path)
    path.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")


def test_targets_round_trip() -> None:
    for text in ("ttft_ms@p99.9", "e2e_ms@p50", "tokens:mean"):
        assert MetricTarget.model_validate(text).label == text
        assert MetricTarget.model_validate({"metric": text, "min_effect": "5%"}).label == text
    with pytest.raises(ValueError, match=r"no metric 'ttft_ms@p9'"):
        MetricTarget.model_validate({"metric": "ttft_ms@p9", "quantile": 0.5})


def test_manifests_round_trip_and_others_are_rejected(tmp_path: Path) -> None:
    plan = manifest(secondary=["ttft_ms@p95"])
    ExperimentFolder(tmp_path).write_manifest(plan)
    assert ExperimentFolder(tmp_path).manifest() == plan
    former = plan.model_dump(mode="json")
    former["config"] |= {
        "covariate": None,
        "store_prompts": True,
        "load": former["config"]["load"] | {"per_turn": None},
    }
    former["config"]["assignment"]["shadow"] = "after"
    (tmp_path / "manifest.json").write_text(json.dumps(former))
    assert ExperimentFolder(tmp_path).manifest() == plan
    (tmp_path / "manifest.json").write_text('{"config": {}}')
    with pytest.raises(ExperimentError, match=r"config\.name: Field required"):
        ExperimentFolder(tmp_path).manifest()
    with pytest.raises(ExperimentError, match="give an experiment's folder"):
        ExperimentFolder(tmp_path / "none").manifest()
