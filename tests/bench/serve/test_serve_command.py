"""`specdec bench serve` against a running server."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from bench.serve.endpoints import ServerUrl
from bench.serve.load import LoadRun, Progress, ServeReport, report_tables
from server.engine_client import EngineClient
from server.request_stream import RequestStream
from specdec.cli.bench_output import print_table
from specdec.cli.bench_serve import replay_command, serve_load_command
from specdec.cli.main import cli
from specdec.core.types import Request
from specdec.errors import ConfigError
from specdec.load.request import Record
from tests.bench.serve.fake_server import FakeServer
from tests.server.http.harness import Server, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as found:
        yield found


def invoke(url: str, *words: str) -> Result:
    return CliRunner().invoke(serve_load_command, ["--url", url, "--warm-up", "1", "--max-slip", "100000", *words])


def figures_of(server: Server, tmp_path: Path, *words: str) -> dict[str, Any]:
    out = tmp_path / "r.json"
    result = invoke(f"{server.url}/v1", *words, "--json", str(out))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_a_closed_loop(server: Server, tmp_path: Path) -> None:
    found = figures_of(
        server, tmp_path, "--workload", "chat", "--concurrency", "3", "--requests", "7", "--max-tokens", "5",
        "--goodput", "e2e:100000",
    )  # fmt: skip
    assert found["requests"]["ok"] == 7 == len(found["each"])
    assert found["goodput"]["share_of_sent"] == 1.0
    assert found["model"] == "fake"
    assert found["valid"] is True


def test_bug_ctrl_c_still_reports(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after = 3

    def interrupt(progress: Progress, record: Record) -> None:
        progress.answered += record.ok
        if record.ok and progress.answered == stop_after:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("bench.serve.load.Progress.add", interrupt)
    out = tmp_path / "r.json"
    words = ("--workload", "chat", "--requests", "10000", "--max-tokens", "2", "--warm-up", "0", "--json", str(out))
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        result = CliRunner().invoke(
            cli, ["bench", "serve", "--url", f"{server.url}/v1", "--max-slip", "100000", *words]
        )
    finally:
        signal.signal(signal.SIGINT, former)
    assert result.exit_code == 130
    assert "the report has what was measured until then" in result.stderr
    assert "whole answer, ms" in " ".join(result.stdout.split())
    found = json.loads(out.read_text())
    assert found["stopped"] is True
    assert found["requests"]["ok"] >= stop_after
    assert found["requests"]["cut"] <= 1


@pytest.mark.parametrize("terminal", [False, True])
def test_bug_values_of_a_slow_server_are_shown_whole(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    run = LoadRun(FakeServer())
    run.records = [Record("slow", 0.0, end_s=123.456, chunk_s=[122.0 + n / 8 for n in range(8)])]
    for table in report_tables(ServeReport(run)):
        print_table(*table)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "123456" in shown


def test_no_progress_is_computed_where_none_is_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LoadRun] = []
    monkeypatch.setattr("bench.serve.load.progress_line", lambda run, _: seen.append(run) or "")
    figures_of(server, tmp_path, "--workload", "chat", "--requests", "2", "--max-tokens", "2")
    assert seen == []


def test_an_open_loop(server: Server, tmp_path: Path) -> None:
    found = figures_of(
        server, tmp_path, "--workload", "chat", "--rate", "20", "--arrivals", "constant", "--duration", "0.5",
        "--max-tokens", "2",
    )  # fmt: skip
    assert [round(each["due_ms"]) for each in found["each"]] == [50 * i for i in range(10)]


def test_a_replay(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    lines = [{"offset_s": i / 10, "prompt": "hello there", "max_tokens": 3, "name": f"n{i}"} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "r.json"
    words = [str(trace), "--url", f"{server.url}/v1", "--warm-up", "1", "--max-slip", "100000", "--speed", "2"]
    result = CliRunner().invoke(replay_command, [*words, "--json", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [(each["name"], each["output_tokens"]) for each in found["each"]] == [(f"n{i}", 3) for i in range(4)]


def test_the_server_knows_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    generate = EngineClient.generate

    def noting(self: EngineClient, request: Request, *given: Any, **named: Any) -> RequestStream:
        seen.append(request.deadline_s)
        return generate(self, request, *given, **named)

    monkeypatch.setattr(EngineClient, "generate", noting)
    words = ("--workload", "chat", "--requests", "2", "--max-tokens", "2")
    for given in ((), ("--deadline", "60")):
        assert invoke(f"grpc://127.0.0.1:{server.grpc_port}", *words, *given).exit_code == 0
    assert len(seen) == 6  # a warm-up and two requests of each run
    assert seen[:3] == [None] * 3
    assert all(0 < (deadline_s or 0) < 66 for deadline_s in seen[3:])  # gRPC rounds it up a little on its way


def test_bug_texts_that_look_like_markup_are_shown_as_they_are(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "monday [busy].jsonl"
    lines = [{"offset_s": 0, "prompt": "hello", "max_tokens": 2, "model": name} for name in ("", "[/INST]")]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = [str(trace), "--url", f"{server.url}/v1", "--warm-up", "0", "--max-slip", "100000"]
    result = CliRunner().invoke(replay_command, words)
    assert result.exit_code == 0, result.output
    assert "replay of monday [busy].jsonl at 1 x" in result.output
    assert "[/INST]" in result.output


def test_bug_long_names_and_cells_are_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, cells = ["workload", *(f"tokens_per_step_of_{n}" for n in range(8))], ["concurrent/humaneval", *"12345678"]
    print_table(heads, [cells])
    in_file = capsys.readouterr().out
    assert all(word in in_file for word in (*heads, *cells))
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    print_table(heads, [cells])
    assert "…" not in capsys.readouterr().out


def test_bug_tables_of_other_figures_show_brackets_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["figure"], [["[/INST] :warning:"]], "models/[busy]/a.gguf")
    printed = capsys.readouterr().out
    assert "models/[busy]/a.gguf" in printed
    assert "[/INST] :warning:" in printed


def test_an_invalid_run_has_an_exit_code_of_its_own() -> None:
    """Every request of this run fails: the server's model cannot fill gaps."""
    with running() as server:
        result = invoke(f"{server.url}/v1", "--workload", "fim", "--requests", "2")
    assert result.exit_code == 3
    assert "INVALID: no request was answered" in result.output


@pytest.mark.parametrize(
    "words",
    [("--rate", "1", "--requests", "3"), ("--goodput", "speed:1"), ("--json", "/nowhere/a.json")],
)  # fmt: skip
def test_words_that_contradict_each_other(words: tuple[str, ...]) -> None:
    result = invoke("http://127.0.0.1:1/v1", *words)
    assert result.exit_code not in (0, 3)
    assert result.exception is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://h:1/v1\n",
        "http://h:1/\x7f",
        "http://h:99999",
        "http://h:0",
        "http://h:x",
        "http://xn--",
        "http://h/v1?a=b",
        "http://h/v1#a",
        "http://h/v1?",
    ],
)
def test_bug_a_url_that_cannot_be_one_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"url: .* is not a URL|url: .* is neither grpc://"):
        ServerUrl.read(url)


def test_bug_a_grpc_url_without_a_port_has_the_server_s() -> None:
    """gRPC would take that of HTTPS."""
    assert [ServerUrl.read(f"grpc://{host}").place for host in ("h", "[::1]", "h:1")] == ["h:8400", "[::1]:8400", "h:1"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--rate 2 --concurrency 4", "--concurrency is for a closed loop"),
        ("--rate 2 --shape 0.3", "--shape is for --arrivals gamma"),
        ("--rate 2 --arrivals constant --shape 0.3", "--shape is for --arrivals gamma"),
        ("--arrivals gamma", "--arrivals is for an open loop"),
        ("--deadline 5", "--deadline is for grpc:// URLs"),
        ("--duration nan", "nan is not in the range 0<x<=1000000000"),
        ("--deadline inf", "inf is not in the range 0<x<=1000000000"),
        ("--temperature nan", "nan is not in the range 0<=x<=1000000000"),
        ("--temperature inf", "inf is not in the range 0<=x<=1000000000"),
        ("--max-tokens 4294967296", "4294967296 is not in the range 1<=x<=4294967295"),
    ],
)
def test_bug_options_without_a_meaning_are_refused(words: str, reason: str) -> None:
    result = invoke("http://127.0.0.1:1/v1", *words.split())
    assert (result.exit_code, reason in result.output) == (2, True)
