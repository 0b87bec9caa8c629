"""`specdec plan`: a plan of drawn and of recorded requests, an export of a real engine, and errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cluster.plan.profile import read_profile
from specdec.cli.main import cli
from tests.cluster.plan.profiles import profile
from tests.models.tiny import make_tiny_model


def specdec(*words: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *words])


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "profile.json"
    file.write_text(profile(drafted=[(4, 2)]).model_dump_json())
    return str(file)


def figures(*words: str) -> dict[str, Any]:
    done = specdec(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_fewest_replicas_for_an_objective(path: str) -> None:
    load = ("--profile", path, "--rate", "20", "--duration", "4", "--same-length", "--sessions", "8")
    found = figures(*load, "--objective", "ttft:300")
    assert found["replicas"] > 1
    assert found["goal"]["enough"]
    assert found["goal"]["kept_by"] >= 0.99
    assert found["latency"]["ttft_ms"]["p99"] <= 300
    fewer = figures(*load, "--objective", "ttft:300", "--replicas", str(found["replicas"] - 1))
    assert not fewer["goal"]["enough"]


def test_each_number_tried_has_its_share(path: str) -> None:
    """A run that misses the goal ends there, so its share is that of the first requests."""
    load = ("--rate", "4", "--duration", "5", "--arrivals", "constant", "--same-length", "--share", "0.9")
    for objective, said in (
        ("ttft:1", "1 replica: too few, 0.00% of the first 3 requests meet it\n2 replicas: too few, "),
        ("ttft:90000", "1 replica: enough, 100.00% of all 20 requests meet it\n"),
    ):
        assert specdec("--profile", path, *load, "--objective", objective).stderr.startswith(said)


def test_bug_a_row_stays_on_one_line_in_a_pipe(path: str) -> None:
    goals = [word for name in ("ttft:12345", "tpot:12345", "e2e:12345") for word in ("--objective", name)]
    done = specdec("--profile", path, "--rate", "5", "--duration", "4", "--replicas", "2", *goals)
    (row,) = (line for line in done.output.splitlines() if "within" in line)
    assert "ttft:12345 ms, tpot:12345 ms, e2e:12345 ms" in row
    assert row.rstrip(" │").endswith("of requests sent, 99.00% wanted")


def test_a_human_readable_table(path: str) -> None:
    done = specdec("--profile", path, "--rate", "5", "--duration", "4", "--replicas", "2", "--objective", "tpot:30")
    assert done.exit_code == 0, done.output
    for word in ("replicas", "ttft", "tpot", "prefix hits", "busiest replica over the mean"):
        assert word in done.output


def test_a_trace_at_its_own_times_and_at_a_rate(path: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"offset_s": n / 10, "prompt_ids": [*range(n, n + 100)], "max_tokens": 5} for n in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = figures("--profile", path, "--trace", str(trace), "--replicas", "1")
    assert own["requests"] == {"sent": 20, "ok": 20}
    assert own["throughput"]["output_tokens_per_s"] == pytest.approx(100 / own["duration_s"], rel=1e-3)
    faster = ("--rate", "30", "--duration", "2", "--arrivals", "constant")
    drawn = figures("--profile", path, "--trace", str(trace), *faster, "--replicas", "1")
    assert drawn["requests"]["sent"] == 60


@pytest.mark.parametrize("option", ["--rate", "--duration", "--speed", "--shape", "--deadline"])
def test_bug_numbers_must_be_finite(path: str, option: str) -> None:
    for value in ("nan", "inf"):
        done = specdec("--profile", path, "--replicas", "1", "--rate", "5", option, value)
        assert (done.exit_code, f"Invalid value for '{option}'" in done.stderr) == (2, True), done.output


def test_drawn_prompts_fit_the_context(path: str) -> None:
    """Else one in thirty would be refused, and the plan would find any number of replicas too few."""
    load = ("--profile", path, "--rate", "5", "--duration", "60", "--prompt-tokens", "600", "--replicas", "8")
    assert figures(*load)["errors"] == {}


def test_prompts_of_a_trace_that_no_replica_takes_are_counted(path: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"offset_s": n, "prompt_ids": [1] * n, "max_tokens": 1} for n in (100, 2047, 2048)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = specdec("--profile", path, "--trace", str(trace), "--replicas", "1")
    assert "1 of 3 prompts have more than 2047 tokens" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --profile"),
        (("--profile", "P", "--rate", "1", "--prompt-tokens", "2048"), "the context has room for 2047"),
        (("--profile", "P"), "give --trace PATH, or --rate"),
        (("--profile", "P", "--rate", "1"), "give --objective METRIC:MS"),
        (("--profile", "P", "--rate", "1", "--objective", "ttft"), "--objective: 'ttft' is not METRIC"),
        (("--profile", "P", "--rate", "1", "--objective", "itl:9"), "MILLISECONDS with one of ttft, tpot, e2e"),
        (
            ("--profile", "P", "--rate", "1", "--objective", "ttft:1", "--most", "2"),
            "objective: not met by 2 replicas;",
        ),
        (
            ("--profile", "P", "--rate", "4", "--duration", "1", "--arrivals", "constant", "--objective", "ttft:1"),
            "objective: not met by 4 replicas;",
        ),
        (("--profile", "P", "--rate", "0.001", "--duration", "1", "--replicas", "1"), "no request arrives"),
        (("--profile", "P", "--rate", "1e7", "--replicas", "1"), "rate 1e+07 for a duration of 60 s makes 6e+08"),
        (("--profile", "P", "--rate", "1", "--replicas", "1000000"), "'--replicas': 1000000 is not in the range"),
        (("--profile", "P", "--rate", "1", "--replicas", "1", "--seed", "-1"), "'--seed': -1 is not in the range x>=0"),
        (("--profile", "P", "--rate", "1", "--prompt-tokens", "0"), "'--prompt-tokens': 0 is not in the range x>=1"),
        (("--profile", "P", "--rate", "1", "--share", "nan"), "'--share': nan is not in the range 0<x<=1"),
        (("--profile", "P", "--trace", "P", "--prompt-tokens", "900"), "--prompt-tokens describes random requests"),
        (("--profile", "P", "--trace", "P", "--rate", "4", "--same-length"), "--same-length describes random requests"),
        (("--profile", "P", "--trace", "P", "--duration", "9"), "--duration is for arrivals at a rate; give --rate"),
        (("--profile", "P", "--rate", "4", "--shape", "0.2"), "--shape is for --arrivals gamma"),
        (
            ("--profile", "P", "--trace", "P", "--rate", "4", "--speed", "2"),
            "--speed is for a --trace at its own times",
        ),
        (("--profile", "P", "--trace", "P", "--share", "0.5"), "--share is for --objective; give one"),
        (("--profile", "P", "--trace", "P", "--replicas", "2", "--most", "9"), "--most is for the fewest replicas"),
        (("--profile", "P", "export", "--out", "x"), "give the options of `export` after it"),
        (("export", "--out", "x", "--captured", "P"), "--captured needs --decisions"),
    ],
)
def test_impossible_plans_are_reported(path: str, words: tuple[str, ...], message: str) -> None:
    done = specdec(*(path if word == "P" else word for word in words))
    assert done.exit_code != 0
    assert message in " ".join(done.output.replace("│", " ").split())


def test_an_export_of_several_models_is_refused(tmp_path: Path) -> None:
    """Else the profile would be of the first one."""
    config = tmp_path / "specdec.yaml"
    config.write_text("engines: {writer: {target: random:tiny}, fim: {target: random:small}}\n")
    done = specdec("export", "--config", str(config), "--out", str(tmp_path / "profile.json"))
    assert done.exit_code != 0
    assert "a profile describes one model, not writer, fim" in f"{done.output} {done.exception}"


def test_an_export_of_a_real_engine_can_be_planned_with(tmp_path: Path) -> None:
    model, out = make_tiny_model("llama", tmp_path / "model"), tmp_path / "profile.json"
    done = specdec(
        "export", "--target", str(model), "--out", str(out), "--kv-tokens", "4096", "--max-context", "512",
        "--drafter", "suffix", "--device", "cpu", "--kernels", "reference", "--dtype", "fp32",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    one = read_profile(out)
    assert (one.limits.kv_tokens, one.limits.max_context, one.limits.max_batch) == (4096, 512, 16)
    load = ("--rate", "50", "--duration", "1", "--prompt-tokens", "50", "--output-tokens", "8")
    found = figures("--profile", str(out), *load, "--replicas", "1")
    assert found["requests"]["ok"] == found["requests"]["sent"]
