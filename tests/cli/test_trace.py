"""`specdec trace`: of a server, of a file, decided again."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import specdec.control.trace
from specdec.cli.main import cli
from specdec.cli.trace import TraceSummary, show_trace
from specdec.control.trace import TraceWriter
from specdec.core.types import DrafterTrace, StepTrace, trace_dict, trace_step
from tests.fake_engine import fake_step
from tests.server.harness import running_server, stream_request


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli, ["trace", *args])


def trace_file(path: Path, steps: list[StepTrace]) -> str:
    writer = TraceWriter(path, {"made": "by a test"})
    for step in steps:
        writer.write(step)
    writer.close()
    return str(path)


async def test_the_last_steps_of_a_server() -> None:
    async with running_server() as server:
        address = f"127.0.0.1:{server.addresses.grpc_port}"

        async def run(*args: str) -> Result:
            return await asyncio.to_thread(invoke, "--server", address, *args)

        nothing = await run()
        async for _ in server.generation.GenerateStream(stream_request("hello")):
            pass
        shown = await run("--limit", "3")
        raw = await run("--limit", "2", "--json")
        many = await run("--limit", "5000")
    assert (nothing.exit_code, nothing.stdout) == (0, "no step has been traced yet\n")
    assert (shown.exit_code, raw.exit_code) == (0, 0), shown.output + raw.output
    lines = [json.loads(line) for line in raw.stdout.splitlines()]
    assert lines == [trace_dict(fake_step(5)), trace_dict(fake_step(6))]
    assert (many.exit_code, len(many.stderr.splitlines())) == (1, 1)
    assert "limit: must lie in 1..1024" in many.stderr
    rows = [line for line in shown.stdout.splitlines() if "suffix free 3/4" in line]
    assert [int(re.findall(r"\d+", row)[0]) for row in rows] == [4, 5, 6]
    for text in ("text 7, model off", "3.5/4", "8.2/9.5", "400.0", "3 steps, 12 tokens, 100% of the steps with drafts"):
        assert text in shown.stdout


def test_the_end_of_a_file_is_shown_and_the_whole_is_summarized(tmp_path: Path) -> None:
    file = trace_file(tmp_path / "trace", [fake_step(n) for n in range(1, 101)])
    shown, raw = invoke("show", file, "--limit", "2"), invoke("show", file, "--limit", "3", "--json")
    assert [json.loads(line)["step"] for line in raw.stdout.splitlines()] == [98, 99, 100]
    assert shown.stdout.count("suffix free") == 2
    assert "100 steps, 400 tokens" in shown.stdout
    assert "suffix: 300 of 400 drafts accepted (75%)" in shown.stdout
    assert shown.exit_code == 0


def test_a_small_terminal_shows_every_column() -> None:
    out = io.StringIO()
    step = dataclasses.replace(fake_step(123456), context=7999.4, predicted_verify_ms=123.4, realised_verify_ms=150.0)
    undecided = dataclasses.replace(step, predicted_verify_ms=math.nan)
    show_trace([step, undecided], TraceSummary(), Console(file=out, width=80))
    text = " ".join(out.getvalue().split())
    for part in ("123456", "7999", "123.7/150.5", " -/150.5", "26.5", "suffix free 3/4 text 7, model off", "drafters"):
        assert part in text
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80


def test_an_invalid_trace_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    for command in ("show", "replay"):
        bad, missing = invoke(command, str(tmp_path / "other")), invoke(command, str(tmp_path / "none"))
        assert (bad.exit_code, missing.exit_code) == (1, 2)
        (line,) = bad.stderr.splitlines()
        assert "other" in line


def test_options_before_a_subcommand_are_an_error(tmp_path: Path) -> None:
    file = trace_file(tmp_path / "trace", [fake_step(1)])
    result = invoke("--json", "show", file)
    assert result.exit_code == 2
    assert "options of `show` after it" in result.stderr


def test_replay_prints_the_first_difference_and_sets_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = trace_file(tmp_path / "trace", [fake_step(1)])
    results = []
    for differences in ([], ["step 2: a", "step 3: b"]):
        report = SimpleNamespace(steps=3, differences=differences)
        monkeypatch.setattr(specdec.control.trace, "replay_file", lambda path, report=report: report)
        results.append(invoke("replay", file))
    same, other = results
    assert (same.exit_code, same.stdout) == (0, "3 steps decided again, 0 differences\n")
    assert (other.exit_code, other.stdout) == (
        1,
        "3 steps decided again, 2 differences\nfirst difference: step 2: a\n",
    )


def test_summary_figures() -> None:
    summary = TraceSummary()
    assert "unknown of ms, unknown of tokens" in summary.lines()[1]
    base = fake_step(1)
    parts = [DrafterTrace("model", "on", verified=4, accepted=1), DrafterTrace("suffix", "free", verified=1)]
    for changes in (
        {"predicted_tokens": 3.0, "realised_tokens": 2, "predicted_verify_ms": 7.5, "drafters": parts},
        {"predicted_tokens": 3.0, "realised_tokens": 4, "predicted_verify_ms": 9.5, "drafters": parts, "budget": 0},
        {"predicted_tokens": 1.0, "realised_tokens": 1, "predicted_verify_ms": math.nan, "drafters": []},
    ):
        step = dataclasses.replace(base, predicted_draft_ms=0.5, realised_draft_ms=1.0, **changes)  # type: ignore[arg-type]
        summary.add(dataclasses.replace(step, realised_verify_ms=9.0))
    # A step that was decoded without a decision has no prediction, and no error.
    assert str(summary.tokens_error) == f"{(1 / 2 + 1 / 4) / 2:.1%}"
    assert str(summary.ms_error) == f"{(2 / 10 + 0 / 10) / 2:.1%}"
    assert (summary.steps, summary.speculating, summary.tokens) == (3, 2, 7)
    assert summary.by_drafter["model"].num_accepted_draft_tokens == 2
    assert summary.by_drafter["suffix"].num_draft_tokens == 2
    unmeasured = dataclasses.replace(base, predicted_draft_ms=0.5, predicted_verify_ms=9.5, realised_verify_ms=0.0)
    summary.add(unmeasured)
    assert (summary.steps, str(summary.ms_error)) == (4, f"{(2 / 10 + 0 / 10) / 2:.1%}")
    assert (base.tokens_per_second > 0, unmeasured.tokens_per_second) == (True, 0.0)


def test_json_has_only_finite_numbers() -> None:
    found = trace_dict(dataclasses.replace(fake_step(1), context=math.inf, predicted_draft_ms=math.nan))
    assert (found["context"], found["predicted_draft_ms"], found["rows"]) == (None, None, 5)
    json.dumps(found, allow_nan=False)


def test_a_step_survives_its_json() -> None:
    step = dataclasses.replace(fake_step(1), predicted_verify_ms=math.nan)
    values = json.loads(json.dumps(trace_dict(step), allow_nan=False))
    found = trace_step(values | {"of_a_later_version": 1})
    assert math.isnan(found.predicted_verify_ms)
    assert dataclasses.replace(found, predicted_verify_ms=0.0) == dataclasses.replace(step, predicted_verify_ms=0.0)


def test_a_drafter_that_was_always_off_has_no_acceptance_rate() -> None:
    summary = TraceSummary()
    parts = [DrafterTrace("model", "off"), DrafterTrace("suffix", "free", verified=2)]
    summary.add(dataclasses.replace(fake_step(1), drafters=parts))
    assert summary.lines()[2:] == ["model: no drafts verified", "suffix: 0 of 2 drafts accepted (0%)"]
