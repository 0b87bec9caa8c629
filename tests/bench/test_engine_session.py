"""A whole run with a tiny model, real engines and drafters: tables and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import engine_session
from bench.engine_bench import BenchError, EngineBench, InterleavedRun, WorkloadRuns
from bench.engine_runs import FIXED_GRID, GroupRun, RequestRun
from bench.engine_session import EngineBenchPlan, EngineReport, off_cost, report_tables, run_session
from bench.machine import commit, cpu_model, engine_facts
from bench.workloads import CONCURRENT_NAMES
from bench.workloads.workload import Workload, WorkloadUnavailableError, uncounted
from specdec.cli.main import cli
from specdec.config import EngineConfig
from specdec.control.trace import replay_file
from specdec.core.types import DrafterStats
from specdec.engine.engine import Engine, EngineParts
from specdec.load.request import LoadRequest
from specdec.models.tokenizer import Tokenizer
from tests.engine.tiny_engine import tiny_parts

TEXTS = ("def add(first, second):\n    return", "for i in range(10):\n    print(", "The quick brown fox jumps over")
STEPS = 12  # of each request of the cost of off


def small_workload(
    name: str, tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None], at_once: int
) -> Workload:
    """Replaces `make_workload` by prompts that fit a tiny model."""
    if name == "fim":
        raise WorkloadUnavailableError("the model has no fill-in-the-middle tokens")
    ids = [tuple(tokenizer.encode(text)) for text in TEXTS]
    prompts = [
        LoadRequest(f"{name}/{i}", max_tokens or 24, ids=text, prediction=text, session=name, fixed=True)
        for i, text in enumerate(ids)
    ]
    if name in CONCURRENT_NAMES:
        return Workload(name, (tuple(prompts),))
    return Workload(name, tuple((prompt,) for prompt in [*uncounted(prompts[:1]), *prompts[1:]]))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "make_workload", small_workload)
    monkeypatch.setattr(engine_session, "OFF_COST_TOKENS", STEPS + 1)
    monkeypatch.setattr("bench.machine.BandwidthProbe", _Probe)


class _Probe:
    def __init__(self, cache_dir: Path, threads: int) -> None:
        pass

    def once(self) -> float:
        """Bytes per second."""
        return 4.2e10


def run(**fields: Any) -> tuple[EngineReport, list[str]]:
    said: list[str] = []
    return run_session(tiny_parts(), EngineBenchPlan(**fields), said.append), said


def shown(report: EngineReport) -> str:
    return "\n".join(str((table.title, table.heads, list(table.rows))) for table in report_tables(report))


def test_everything_at_once() -> None:
    report, said = run(
        workloads=("chat", "fim", "concurrent/chat"),
        fixed=(FIXED_GRID[0], FIXED_GRID[-1]),
        off_cost=True,
        temperature=0.8,
    )
    figures = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert figures["workloads"]["chat"]["prompts"] == 2
    assert figures["workloads"]["concurrent/chat"]["prompts"] == 3
    assert figures["skipped"] == ["fim: the model has no fill-in-the-middle tokens"]
    assert "skipped fim: the model has no fill-in-the-middle tokens" in said
    assert set(figures["fixed_ms_per_token"]["chat"]) == {"off", "auto", *report.fixed}
    assert figures["auto_against_best_fixed"]["chat"]["setting"] in report.fixed
    assert len(figures["prompts"]["chat"][0]["arms"]) == 4
    assert figures["off_cost"]["steps"] == 8 * STEPS
    assert figures["machine"]["read_bandwidth_gb_s"] == 42.0
    text = shown(report)
    for word in ("chat", "concurrent/chat", "best fixed", "step_ratio_of_medians"):
        assert word in text


def test_no_table_of_drafters_where_none_drafted() -> None:
    request = RequestRun("a", [1] * 9, 1.0, 8.0)
    group = GroupRun((request,), 0.0, 0)
    report = EngineReport({}, [WorkloadRuns("chat", False, [{"off": group, "auto": group}])])
    assert "by drafter" not in shown(report)
    request.stats.by_drafter["suffix"] = DrafterStats(2, 1)
    assert "50% of 2" in shown(report)


def test_fixed_settings_draft_and_off_does_not() -> None:
    report, _ = run(workloads=("chat",), fixed=(FIXED_GRID[0], FIXED_GRID[-1]))
    for row in report.as_dict()["prompts"]["chat"]:
        arms = row["arms"]
        assert arms["off"]["draft_tokens"] == 0
        assert arms["off"]["steps"] == arms["off"]["tokens"] == 24
        assert arms["2x1"]["draft_tokens"] > 0
        assert arms["2x1"]["draft_tokens"] <= 2 * arms["2x1"]["steps"]


def test_what_was_not_asked_for_is_not_reported() -> None:
    report, _ = run(workloads=("chat",))
    assert set(report.as_dict()) == {"machine", "seconds", "stopped", "skipped", "workloads", "prompts"}
    assert "best fixed" not in shown(report)


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(BenchError, match="nothing to measure: fim: the model has no fill"):
        run(workloads=("fim",))


def test_arms_that_would_wait_for_each_others_pages_are_refused() -> None:
    with pytest.raises(BenchError, match=r"chat: 9 arms need \d+ tokens .*engine\.kv_tokens"):
        run(workloads=("chat",), fixed=FIXED_GRID, max_tokens=500)


def test_only_autos_decisions_are_written_down(tmp_path: Path) -> None:
    parts = tiny_parts()
    file = tmp_path / "trace.jsonl"
    speculation = parts.config.speculation.model_copy(update={"trace_file": file})
    traced = dataclasses.replace(parts, config=parts.config.model_copy(update={"speculation": speculation}))
    run_session(traced, EngineBenchPlan(workloads=("chat",)), lambda line: None)
    report = replay_file(file)
    assert report.steps
    assert not report.differences


def test_cost_of_off_compares_equal_work_and_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    step = Engine.step

    def counted(engine: Engine) -> Any:
        engines.append(engine)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    parts = tiny_parts()
    engine = Engine(parts)
    free = parts.kv.n_free
    figures = off_cost(engine, parts)
    assert figures["steps"] == 8 * STEPS
    assert figures["loaded_step_ms"] > 0 < figures["bare_step_ms"]
    (bare,) = {each for each in engines if each is not engine}
    assert engines.count(engine) == engines.count(bare)
    assert not engine.has_work()
    assert parts.kv.n_free == free


def test_ratios_of_the_cost_of_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of three steps each, after a warm-up."""
    times = iter([[9.0] * 3] * 2 + [[2.0, 2.0, 8.0], [1.0, 4.0, 4.0], [3.0] * 3, [3.0] * 3])

    def play(runs: list[InterleavedRun]) -> None:
        for run in runs:
            run.steps_ms = [50.0, *next(times)]  # that of the prompt first

    monkeypatch.setattr(engine_session, "run_interleaved", play)
    monkeypatch.setattr(engine_session, "OFF_COST_TOKENS", 4)
    monkeypatch.setattr(engine_session, "OFF_COST_REQUESTS", 2)
    parts = tiny_parts()
    figures = off_cost(Engine(parts), parts)
    assert (figures["loaded_step_ms"], figures["bare_step_ms"], figures["steps"]) == (3.0, 3.0, 6)
    assert figures["step_ratio_of_medians"] == 1.0
    assert figures["step_median_of_ratios"] == 1.0
    assert figures["tpot_ratio_of_medians"] == pytest.approx(3.5 / 3.0, abs=1e-4)


def test_ctrl_c_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.build.build_parts", lambda config, progress: tiny_parts())
    group = EngineBench._group

    def interrupted(bench: EngineBench, workload: Workload, prompts: Any) -> Any:
        if workload.name == "edit" and prompts[0].counted:
            raise KeyboardInterrupt
        return group(bench, workload, prompts)

    monkeypatch.setattr(EngineBench, "_group", interrupted)
    path = tmp_path / "figures.json"
    words = ["bench", "engine", "--max-tokens", "12", "--json", str(path), "--workload"]
    result = CliRunner().invoke(cli, [*words, "chat", "--workload", "edit", "--off-cost"])
    assert result.exit_code == 130
    assert "the report has what was measured until then" in result.stderr
    assert "chat" in result.stdout
    figures = json.loads(path.read_text())
    assert figures["stopped"] is True
    assert list(figures["workloads"]) == ["chat"]
    path.unlink()
    assert CliRunner().invoke(cli, [*words, "edit"]).exit_code == 130  # nothing was measured
    assert not path.exists()


def test_machine() -> None:
    facts = engine_facts(tiny_parts().config, tiny_parts().info)
    assert facts["cpu"] == cpu_model() != ""
    assert facts["drafters"] == list(tiny_parts().info.drafters)
    assert facts["date"].endswith("+00:00")


def test_no_commit_outside_a_checkout_or_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None


def test_command_writes_json_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[EngineConfig] = []

    def build(config: EngineConfig, progress: object) -> EngineParts:
        built.append(config)
        return tiny_parts()

    monkeypatch.setattr("specdec.engine.build.build_parts", build)
    path = tmp_path / "figures.json"
    words = ["bench", "engine", "--workload", "chat", "--max-tokens", "12", "--json", str(path)]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["workloads"]["chat"]["prompts"] == 2
    assert "speculation off and auto" in result.stdout
    assert "chat 2/2: off" in result.stderr
    assert built[0].max_batch == 16
    assert built[0].kv_tokens == 2 * 20480
    assert CliRunner().invoke(cli, [*words, "--at-once", "300"]).exit_code == 2
    full = CliRunner().invoke(cli, [*words[:-1], "/dev/full"])
    assert full.exit_code == 1
    assert "--json: /dev/full cannot be written (No space left on device)" in full.stderr
    assert "speculation off and auto" in full.stdout  # what was measured is shown
    assert CliRunner().invoke(cli, [*words[:-1], str(tmp_path / "no" / "folder.json")]).exit_code == 2
