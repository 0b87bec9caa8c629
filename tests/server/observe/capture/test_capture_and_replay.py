"""From live requests to captures, and back to a server: with prompts, and without a word of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from server.observe.capture import CAPTURE_FILES, Capture
from server.observe.observer import Observer
from specdec.cli.main import cli
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationStats,
    Started,
    StoppingParams,
    Timings,
    Usage,
)
from specdec.errors import ConfigError, FieldViolation, InvalidRequestError, PromptTooLongError, RequestError
from specdec.load.trace_file import read_trace_lines
from tests.bench.experiment.both_faces import both_faces
from tests.server.observe.capture.lines import captured_lines

SECRET = "a secret wish"
BODY = {
    "prompt": SECRET, "max_tokens": 4, "temperature": 0.5, "top_p": 0.25, "seed": 3, "stop": ["never", "said"],
    "session": "alice", "cache_salt": "tenant-7", "prediction": {"type": "content", "content": "as expected"},
}  # fmt: skip


def specdec(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def ask(url: str, **fields: Any) -> None:
    httpx.post(f"{url}/completions", json=BODY | fields, timeout=20).raise_for_status()


@pytest.mark.parametrize("prompts", [False, True])
def test_a_capture_round_trips_through_replay(tmp_path: Path, prompts: bool) -> None:
    folder = tmp_path / "capture"
    with both_faces(capture_dir=folder, capture_prompts=prompts) as server:
        ask(server.http)
        ask(server.http, session="bob", prompt="another one")
        ask(server.http, max_tokens=0)
        lines = captured_lines(folder)
        data = b"".join(path.read_bytes() for path in CAPTURE_FILES.paths(folder))
        done = specdec(
            "replay", str(folder), "--url", server.grpc, "--quiet", "--warm-up", "0", "--speed", "9",
            "--max-slip", "100000", "--json", str(tmp_path / "r.json"),
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        again = captured_lines(folder)[2:]
    figures = json.loads((tmp_path / "r.json").read_text())
    assert [(each["name"], each["output_tokens"]) for each in figures["each"]] == [
        (f"capture-00000001.jsonl, line {number}", 4) for number in (1, 2)
    ]
    assert lines[0]["offset_s"] < lines[1]["offset_s"]
    assert lines[0]["session"] != lines[1]["session"]
    assert lines[0]["salt"] == lines[1]["salt"]
    assert (len(lines), len(again)) == (2, 2)  # the request that only warms the cache is not captured
    for line in lines + again:
        assert (line["temperature"], line["top_p"], line["seed"], line["max_tokens"]) == (0.5, 0.25, 3, 4)
        assert line["was_tokens"] == 4
        assert line["was_first_s"] > 0
    assert again[0]["session"] != again[1]["session"]
    assert again[0]["salt"] == again[1]["salt"]
    spelled = [SECRET.encode(), b"never", b"alice", b"tenant-7"]
    if prompts:
        assert bytes(lines[0]["prompt_ids"][1:]).decode() == SECRET
        assert lines[0]["stop"] == ["never", "said"]
        assert {bytes(line["prediction_ids"]) for line in lines + again} == {b"as expected"}
        # Records are written as requests end, and two that arrive within milliseconds may end in either order.
        assert sorted(line["prompt_ids"] for line in again) == sorted(line["prompt_ids"] for line in lines)
    else:
        assert not any(word in data for word in spelled)
        assert all(not {"prompt_ids", "prediction_ids", "stop"} & line.keys() for line in lines)
        assert lines[0]["prompt_tokens"] == len(SECRET) + 1
        assert lines[0]["fixed"] is True


def test_an_experiment_accepts_a_capture(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    with both_faces(capture_dir=folder, capture_prompts=True) as server:
        for number in range(10):
            ask(server.http, prompt=f"number {number}")
        trace = tmp_path / "trace.jsonl"
        trace.write_bytes(b"".join(path.read_bytes() for path in CAPTURE_FILES.paths(folder)))
        plan = {
            "name": "trace", "load": {"trace": "trace.jsonl"},
            "arms": {"a": {}, "b": {"request": {"speculation": "off"}}}, "stopping": {"max_slip_ms": 1e6},
        }  # fmt: skip
        (tmp_path / "plan.yaml").write_text(json.dumps(plan))
        words = ("--url", server.grpc, "--out", str(tmp_path / "out"), "--demand", "none", "--quiet")
        done = specdec("ab", "run", str(tmp_path / "plan.yaml"), *words)
        assert done.exit_code == 0, done.output
        found = json.loads((tmp_path / "out/result.json").read_text())
        assert (found["compared_outputs"], found["mismatched_outputs"]) == (10, 0)
        trace.write_text(trace.read_text() + "\n")
        assert "facts.load was" in specdec("ab", "run", str(tmp_path / "plan.yaml"), *words).output


def test_one_of_several_samples_is_replayed(tmp_path: Path) -> None:
    capture = Capture(tmp_path, prompts=False)
    request = Request("a", (1, 2), SamplingParams(n=2), StoppingParams(max_tokens=9))
    record = Observer([capture]).request(request)
    for index in (0, 1):
        record.saw(Delta("a", index, [5, 6, 7], ""))
    record.ended(True)
    capture.close()
    [(_, line)] = read_trace_lines(tmp_path)
    assert (line.max_tokens, line.was_tokens, line.fixed) == (3, 6, True)


@pytest.mark.parametrize(
    ("reason", "limit"),
    [(FinishReason.EOS, 9), (FinishReason.LINES, 3), (FinishReason.TIME_LIMIT, 3), (None, 3)],
)
def test_an_answer_that_would_not_end_again_keeps_its_length(
    tmp_path: Path, reason: FinishReason | None, limit: int
) -> None:
    """reason: None: its reader has left."""
    capture = Capture(tmp_path, prompts=True)
    record = Observer([capture]).request(Request("a", (1, 2), stopping=StoppingParams(max_tokens=9)))
    record.saw(Started("a", 1, 2, 0, 0.0))
    record.saw(Delta("a", 0, [5, 6, 7], ""))
    if reason is not None:
        record.saw(Finished("a", 0, reason, None, Usage(2, 0, 3), SpeculationStats(), Timings()))
    record.ended(reason is not None)
    capture.close()
    [(_, line)] = read_trace_lines(tmp_path)
    assert line.max_tokens == limit


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError([FieldViolation("prompt", "must hold at least one token")]), PromptTooLongError(9, 8)],
)
def test_an_invalid_request_is_not_captured(tmp_path: Path, error: RequestError) -> None:
    """A line with impossible tokens, or none, could not be read, and would make the folder useless."""
    capture = Capture(tmp_path, prompts=True)
    record = Observer([capture]).request(Request("a", ()))
    record.error = error
    record.ended(True)
    capture.close()
    assert captured_lines(tmp_path) == []


def test_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server.capture_dir: .*file cannot be written"):
        Capture(tmp_path / "file", 1 << 20, prompts=False)


def test_arrival_times(tmp_path: Path) -> None:
    """In Unix time, though requests are written when they end."""
    capture = Capture(tmp_path, 1 << 20, prompts=False)
    observer = Observer([capture])
    before = time.time()
    record = observer.request(Request("a", (1, 2)))
    record.began_s -= 100.0
    record.ended(False)
    capture.close()
    [line] = captured_lines(tmp_path)
    assert before - 100 <= line["offset_s"] + 0.01
    assert line["offset_s"] <= time.time() - 100 + 0.01


@pytest.mark.parametrize("jump_s", [5 * 3600.0, -5 * 3600.0])
def test_a_step_of_the_clock_leaves_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    capture = Capture(tmp_path, 1 << 20, prompts=False)
    observer, clock = Observer([capture]), time.time
    observer.request(Request("a", (1, 2))).ended(False)
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    observer.request(Request("b", (1, 2))).ended(False)
    capture.close()
    first, second = captured_lines(tmp_path)
    assert 0 <= second["offset_s"] - first["offset_s"] < 60
