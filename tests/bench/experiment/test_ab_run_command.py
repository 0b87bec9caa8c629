"""`specdec ab run` against running servers: options, files, and a kill during the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.serve.endpoints import EndpointError, connect
from server.experiment.folder import ExperimentFolder
from server.experiment.records import read_records
from specdec.cli.main import cli
from tests.bench.experiment.both_faces import Faces, both_faces
from tests.bench.experiment.stub_openai import stub_openai

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server() -> Iterator[Faces]:
    with both_faces() as found:
        yield found


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path)


def write_plan(folder: Path, **fields: Any) -> Path:
    default: dict[str, Any] = {
        "name": "off-or-auto",
        "arms": {"off": {"request": {"speculation": "off"}}, "auto": {"request": {"priority": 1}}},
        "load": {"workload": "chat", "max_tokens": 4},
        "warmup_requests": 1,
        "stopping": {"max_requests": 20, "max_slip_ms": 1e6},
    }
    path = folder / "plan.yaml"
    path.write_text(json.dumps(default | fields))
    return path


def invoke(plan: Path, out: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["ab", "run", str(plan), "--out", str(out), "--quiet", *words])


def finished(plan: Path, out: Path, *words: str) -> dict[str, Any]:
    """The result of a run with any verdict."""
    done = invoke(plan, out, "--demand", "none", *words)
    assert done.exit_code == 0, done.output
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_both_arms_of_one_server(server: Faces, plan: Path, tmp_path: Path, face: str) -> None:
    found = finished(plan, tmp_path / "out", "--url", getattr(server, face))
    assert [arm["requests"] for arm in found["arms"]] == [10, 10]
    assert [arm["failed"] for arm in found["arms"]] == [0, 0]
    assert (found["compared_outputs"], found["mismatched_outputs"]) == (10, 0)
    assert found["facts"]["outputs compared by"] == "token ids"
    assert found["arms"][0]["settings"] == {"request.speculation": "off", "url": getattr(server, face)}
    records = read_records(tmp_path / "out").records
    assert all(record.tokens == 4 and record.accepted for record in records)
    assert all((record.started is not None) == (face == "grpc") for record in records)


def test_arms_on_two_faces(server: Faces, plan: Path, tmp_path: Path) -> None:
    found = finished(plan, tmp_path / "out", "--a", server.grpc, "--b", server.http)
    assert (found["compared_outputs"], found["mismatched_outputs"]) == (10, 0)
    assert found["arms"][1]["settings"]["url"] == server.http


def test_text_is_compared_where_a_server_tells_no_tokens(plan: Path, tmp_path: Path) -> None:
    bare = write_plan(tmp_path, arms={"a": {}, "b": {}})
    with stub_openai() as a, stub_openai() as b:
        found = finished(bare, tmp_path / "same", "--a", a.url, "--b", b.url)
        assert (found["compared_outputs"], found["mismatched_outputs"]) == (10, 0)
        assert found["facts"]["outputs compared by"] == "text"
        assert a.questions() == b.questions()
        assert not any("cache_salt" in body or "return_token_ids" in body for body in a.asked + b.asked)
    with stub_openai() as a, stub_openai("!") as b:
        done = invoke(bare, tmp_path / "other", "--a", a.url, "--b", b.url)
    assert done.exit_code == 12
    assert "Invalid: 10 of 10 pairs got different tokens" in done.output


def test_urls_in_the_plan(server: Faces, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, arms={"a": {"url": server.grpc}, "b": {"url": server.http}})
    assert finished(plan, tmp_path / "out")["compared_outputs"] == 10


def test_bug_a_report_names_the_server_that_was_asked(server: Faces, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, arms={"a": {"url": "grpc://far-a:1"}, "b": {"url": "grpc://far-b:1"}})
    found = finished(plan, tmp_path / "out", "--url", server.grpc)
    assert [arm["settings"] for arm in found["arms"]] == [{"url": server.grpc}] * 2
    assert "far-a" not in (tmp_path / "out" / "manifest.json").read_text()


def test_fewer_requests_and_json(server: Faces, plan: Path, tmp_path: Path) -> None:
    done = invoke(plan, tmp_path / "out", "--url", server.grpc, "--max-requests", "6", "--json", "--demand", "none")
    assert json.loads(done.stdout)["arms"][0]["requests"] == 3
    assert ExperimentFolder(tmp_path / "out").manifest().config.stopping.max_requests == 6


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "give one of --url, --a and --b, --target; there is none"),
        (("--a", "grpc://h:1"), 2, "--a and --b belong together"),
        (("--url", "grpc://h:1", "--target", "x"), 2, "there is --url and --target"),
        (("--url", "grpc://h:1", "--b-key-file", "{plan}"), 2, "--b-key-file means nothing without --b"),
        (("--url", "grpc://h:1", "--b-model", "m"), 2, "--b-model means nothing without --b"),
        (("--target", "x", "--model", "m"), 2, "--model means nothing for the server of --target"),
        (("--url", "nonsense"), 1, "--url (arm 'off'): nonsense: 'nonsense' is neither grpc://"),
        (("--a", "http://h:99999", "--b", "grpc://h:1"), 1, "--a (arm 'off'): http://h:99999: "),
        (("--url", "http://127.0.0.1:1/v1"), 1, "--url (arm 'off'): http://127.0.0.1:1/v1: "),
    ],
)
def test_words_that_lead_nowhere(plan: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    done = invoke(plan, tmp_path / "out", *(word.format(plan=plan) for word in words))
    assert (done.exit_code, message in done.output) == (code, True), done.output
    assert not (tmp_path / "out").exists()


def test_bug_a_refused_key_is_asked_for_by_its_own_option(
    server: Faces, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(url: str, *given: Any, **named: Any) -> Any:
        if url == server.http:
            raise EndpointError("refuses the key (HTTP 401); give one with --key-file")
        return await connect(url, *given, **named)

    monkeypatch.setattr("bench.experiment.plan.connect", refusing)
    done = invoke(plan, tmp_path / "out", "--a", server.grpc, "--b", server.http)
    assert "--b (arm 'auto')" in done.output
    assert "give one with --b-key-file" in done.output
    assert "give one with --key-file" in invoke(plan, tmp_path / "out", "--url", server.http).output


def test_mode_aa_has_one_server(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, arms={"a": {}, "b": {}}, assignment={"mode": "aa"})
    done = invoke(plan, tmp_path / "out", "--a", "grpc://h:1", "--b", "grpc://h:2")
    assert (done.exit_code, "--b: mode aa compares an arm with itself" in done.output) == (2, True)


def test_an_option_that_the_server_does_not_take(server: Faces, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, arms={"a": {}, "b": {"request": {"speculation": {"drafters": ["dream"]}}}})
    done = invoke(plan, tmp_path / "out", "--url", server.grpc)
    assert done.exit_code == 1
    assert "arms.b: the server rejects this arm's requests" in done.output
    assert "dream" in done.output


def test_a_bad_plan_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("name: x\narms:\n  a: {}\n  b: {request: {speculation: {depth: 3}}}\nload: {workload: chat}\n")
    done = invoke(path, tmp_path / "out", "--url", "grpc://h:1")
    assert done.exit_code == 1
    assert "line 4: arms.b.request.speculation.depth: an arm cannot change it" in done.output


def test_killed_and_taken_up(tmp_path: Path) -> None:
    """SIGKILL during a request: complete pairs are not sent again, and every pair counts once."""
    plan, out = write_plan(tmp_path, arms={"a": {"request": {"body": {"arm": "a"}}}, "b": {}}), tmp_path / "out"
    with stub_openai() as server:
        server.stall_at = 2 + 2 + 2 * 4 + 2  # probes, warm-up, four pairs, and the second request of the fifth
        words = [sys.executable, "-m", "specdec.cli.main", "ab", "run", str(plan), "--url", server.url]
        process = subprocess.Popen([*words, "--out", str(out), "--quiet"], cwd=ROOT, env=dict(os.environ))
        try:
            assert server.stalled.wait(60)
        finally:
            process.kill()
            process.wait(30)
        assert len(read_records(out).records) == 2 + 2 * 4
        half = server.asked[-2]["messages"]
        server.release()
        before = len(server.asked)
        found = finished(plan, out, "--url", server.url)
        again = server.asked[before:]
    assert [arm["requests"] for arm in found["arms"]] == [10, 10]
    assert found["primary"]["units"] == 10
    assert (found["compared_outputs"], found["mismatched_outputs"]) == (10, 0)
    assert not any("without the other" in note or "already had one" in note for note in found["notes"])
    assert len(again) == 2 + 2 + 2 * 6
    assert [body["messages"] for body in again[4:6]] == [half, half]
    counted = [r for r in read_records(out).records if not r.warm_up]
    assert Counter(r.pair.partition(".")[0] for r in counted) == {f"{n:06}": 2 for n in range(10)}
    assert len({json.dumps(body["messages"]) for body in server.asked}) == 1 + 10  # with the warm-up


def test_ctrl_c_says_that_the_records_stay(tmp_path: Path) -> None:
    plan, out = write_plan(tmp_path, arms={"a": {}, "b": {}}), tmp_path / "out"
    with stub_openai() as server:
        server.stall_at = 2 + 2 + 2 * 4 + 2  # probes, warm-up, four pairs, and the second request of the fifth
        words = [sys.executable, "-m", "specdec.cli.main", "ab", "run", str(plan), "--url", server.url]
        heeding = ["env", "--default-signal=INT"]  # a shell's background jobs ignore it
        process = subprocess.Popen([*heeding, *words, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stalled.wait(60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
            process.wait(30)
            server.release()
    assert process.returncode == 130
    assert said == f"\nstopped; the records stay in {out}, and the same command goes on with them\n"
    assert len(read_records(out).records) >= 2 + 2 * 4


def test_a_plan_for_servers_of_its_own_kind(server: Faces, tmp_path: Path) -> None:
    """A foreign server gets our fields only if the plan sets them."""
    plan = write_plan(tmp_path, arms={"a": {"request": {"body": {"x": 1}}}, "b": {"request": {"speculation": "on"}}})
    with stub_openai() as stub:
        finished(plan, tmp_path / "out", "--url", stub.url)
        kinds = Counter((body.get("x"), json.dumps(body.get("speculation"))) for body in stub.asked)
    assert kinds == {(1, "null"): 12, (None, '{"mode": "on"}'): 12}


def test_bug_a_run_goes_on_from_another_folder(server: Faces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of its trace is another one there."""
    lines = [{"prompt": f"number {i}", "max_tokens": 2, "offset_s": i / 100} for i in range(4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plan, out = write_plan(tmp_path, load={"trace": "trace.jsonl"}), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    finished(Path(plan.name), out, "--url", server.grpc)
    monkeypatch.chdir("/")
    assert finished(plan, out, "--url", server.grpc)["arms"][0]["requests"] == 4
    (tmp_path / "trace.jsonl").write_text(json.dumps(lines[0]))
    done = invoke(plan, out, "--url", server.grpc)
    assert done.exit_code == 1
    assert "contains a run of another experiment (facts.load was 'replay of trace.jsonl" in done.output
