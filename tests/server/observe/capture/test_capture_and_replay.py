"""From live requests to a trace, and back to a server: with prompts, and without a word of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from server.observe.capture import CAPTURE_FILES, Capture, make_trace, read_entries
from server.observe.observer import Observer
from specdec.cli.main import cli
from specdec.core.types import Request
from specdec.errors import ConfigError
from tests.bench.experiment.both_faces import both_faces

SECRET = "a secret wish"
BODY = {
    "prompt": SECRET, "max_tokens": 4, "temperature": 0.5, "top_p": 0.25, "seed": 3, "stop": ["never", "said"],
    "session": "alice", "cache_salt": "tenant-7",
}  # fmt: skip


def specdec(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def captured(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The lines of a trace of all received requests."""
    out = folder.parent / "trace.jsonl"
    done = specdec("capture", str(folder), "--out", str(out), *words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in out.read_text().splitlines()]


def ask(url: str, **fields: Any) -> None:
    httpx.post(f"{url}/completions", json=BODY | fields, timeout=20).raise_for_status()


@pytest.mark.parametrize("prompts", [False, True])
def test_a_capture_round_trips_through_replay(tmp_path: Path, prompts: bool) -> None:
    folder = tmp_path / "capture"
    with both_faces(capture_dir=folder, capture_prompts=prompts) as server:
        ask(server.http)
        ask(server.http, session="bob", prompt="another one")
        ask(server.http, max_tokens=0)
        lines = captured(folder)
        data = b"".join(path.read_bytes() for path in CAPTURE_FILES.paths(folder))
        done = specdec(
            "replay", str(tmp_path / "trace.jsonl"), "--url", server.grpc, "--quiet", "--warm-up", "0", "--speed", "9",
            "--max-slip", "100000", "--json", str(tmp_path / "r.json"),
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        again = list(read_entries(folder))[3:]
    figures = json.loads((tmp_path / "r.json").read_text())
    assert [(each["name"], each["output_tokens"]) for each in figures["each"]] == [("captured/0", 4), ("captured/1", 4)]
    assert lines[0]["offset_s"] == 0.0
    assert lines[0]["offset_s"] < lines[1]["offset_s"]
    assert lines[0]["session"] != lines[1]["session"]
    assert lines[0]["salt"] == lines[1]["salt"]
    for line, entry in zip(lines, again, strict=True):
        assert (line["temperature"], line["top_p"], line["seed"], line["max_tokens"]) == (0.5, 0.25, 3, 4)
        assert (entry["temperature"], entry["top_p"], entry["seed"], entry["output_tokens"]) == (0.5, 0.25, 3, 4)
        assert (line["was_status"], line["was_tokens"]) == ("ok", 4)
    assert again[0]["session"] != again[1]["session"]
    assert again[0]["salt"] == again[1]["salt"]
    spelled = [SECRET.encode(), b"never", b"alice", b"tenant-7", bytes(SECRET.encode())]
    if prompts:
        assert bytes(lines[0]["prompt_ids"][1:]).decode() == SECRET
        assert lines[0]["stop"] == ["never", "said"]
        # Records are written as requests end, and two that arrive within milliseconds may end in either order.
        assert sorted(entry["ids"] for entry in again) == sorted(line["prompt_ids"] for line in lines)
    else:
        assert not any(word in data for word in spelled)
        assert all("prompt_ids" not in line and "stop" not in line for line in lines)
        assert lines[0]["prompt_tokens"] == len(SECRET) + 1
        assert lines[0]["fixed"] is True


def test_an_experiment_accepts_a_capture(tmp_path: Path) -> None:
    folder = tmp_path / "capture"
    with both_faces(capture_dir=folder, capture_prompts=True) as server:
        for number in range(10):
            ask(server.http, prompt=f"number {number}")
        captured(folder)
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
        (tmp_path / "trace.jsonl").write_text((tmp_path / "trace.jsonl").read_text() + "\n")
        assert "facts.load was" in specdec("ab", "run", str(tmp_path / "plan.yaml"), *words).output


def test_only_requests_of_the_period_are_captured(tmp_path: Path) -> None:
    entry = {
        "at_s": 0.0, "end_s": 1.0, "status": "ok", "prompt_tokens": 3, "output_tokens": 6, "blocks": [], "n": 2,
        "max_tokens": None, "ignore_eos": False, "seed": None, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
        "min_p": 0.0, "session": b"", "salt": b"",
    }  # fmt: skip
    entries = [entry | {"at_s": float(at)} for at in (30, 10, 20, 40)]
    found = list(make_trace(entries, 15.0, 40.0))
    assert [line["offset_s"] for line in found] == [0.0, 10.0]
    assert found[0]["max_tokens"] == 3  # of one sample
    assert not {"seed", "session", "salt", "top_p"} & found[0].keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no captured requests; start the server with --capture"),
    ],
)
def test_invalid_arguments(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = specdec("capture", str(tmp_path), "--out", str(tmp_path / "t"), *words)
    assert done.exit_code != 0
    assert message in done.output


def test_a_period_without_requests(tmp_path: Path) -> None:
    Capture(tmp_path, 1 << 20, prompts=False).close()
    for words, message in (
        (("--last", "5m"), "no requests in that time"),
        (("--last", "soon"), "give a time such as 30s"),
    ):
        done = specdec("capture", str(tmp_path), "--out", str(tmp_path / "t"), *words)
        assert done.exit_code != 0
        assert message in done.output
    assert not (tmp_path / "t").exists()


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
    [entry] = read_entries(tmp_path)
    assert before - 100 <= entry["at_s"] + 0.01
    assert entry["at_s"] <= time.time() - 100 + 0.01
    assert entry["status"] == "LEFT"
    assert entry["end_s"] >= 100
