"""`specdec bench peers` with fake servers as engines."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.peers import ENGINES, PEER_WORKLOADS, peers_session
from bench.peers.peer import PeerError, PeersPlan
from bench.peers.peer_process import HttpPeer
from bench.peers.peers_report import PeersRun
from specdec.cli.main import cli
from specdec.load.request import LoadRequest, Record
from tests.bench.peers.peers import asks_in, server

TARGET = "smollm2-135m"


def invoke(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, ["bench", "peers", "--target", TARGET, *words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the probe, which reads a gigabyte of memory."""
    monkeypatch.setattr(peers_session, "read_bandwidth_gb_s", lambda cache_dir, threads: 40.0)


def _absent(*_: object) -> list[HttpPeer]:
    raise PeerError("not installed; `make peers` installs it")


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def peers(*_: object) -> list[HttpPeer]:
        return [
            server("good", tmp_path),
            server("mortal", tmp_path, "--die-at", "3"),
            server("broken", tmp_path, "--fail"),
        ]

    monkeypatch.setattr(peers_session, "MAKERS", {"specdec": peers, "llama.cpp": _absent, "vllm": _absent})
    return tmp_path


def test_bug_what_is_named_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[PeersPlan] = []

    async def run(plan: PeersPlan) -> PeersRun:
        plans.append(plan)
        return PeersRun()

    monkeypatch.setattr("specdec.cli.bench._run", run)
    words = ["--workload", "fim", "--workload", "chat", "--workload", "fim", "--engine", "vllm", "--engine", "vllm"]
    invoke(*words)
    invoke()
    assert [(plan.workloads, plan.engines) for plan in plans] == [
        (("fim", "chat"), ("vllm",)),
        (PEER_WORKLOADS, ENGINES),
    ]


@pytest.mark.model
def test_tables_figures_and_reasons(fakes: Path) -> None:
    out = fakes / "out.json"
    text = invoke(
        "--workload", "humaneval", "--workload", "fim", "--prompts", "2", "--max-tokens", "3", "--json", str(out)
    )
    assert "**humaneval**, 2 prompts of" in text
    assert "- without vllm: not installed" in text
    assert "- without broken: the process ended before it was ready: error: no such model" in text
    assert "- without mortal: HumanEval/" in text
    assert "- left out fim: the model has no fill-in-the-middle tokens" in text
    figures = json.loads(out.read_text())
    assert figures["workloads"]["humaneval"]["good"]["answered"] == 2
    assert figures["workloads"]["humaneval"]["good"]["tokens"] == 6
    assert figures["workloads"]["humaneval"]["mortal"]["answered"] < 2
    assert {"cpu", "cores", "threads", "target", "commit", "date"} <= set(figures["machine"])
    asks = asks_in(fakes)
    good = [ask["prompt"] for ask in asks if ask["name"] == "good"]
    assert len(good) == 4  # one to warm the process up, one to warm the workload up, two that count
    mortal = [ask["prompt"] for ask in asks if ask["name"] == "mortal"]
    assert mortal == good[: len(mortal)]


@pytest.mark.model
def test_nothing_to_ask_and_nobody_to_ask_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no prompts: fim:" in invoke("--workload", "fim", code=1)
    monkeypatch.setattr(peers_session, "MAKERS", dict.fromkeys(peers_session.MAKERS, _absent))
    assert "no engine: specdec: not installed" in invoke("--workload", "chat", code=1)


@pytest.mark.model
@pytest.mark.parametrize("engine", ["llama.cpp", "vllm"])
def test_what_is_not_installed_says_so(engine: str, tmp_path: Path) -> None:
    from specdec.config import EngineConfig

    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "models").symlink_to(EngineConfig().cache_dir.expanduser() / "models")
    text = invoke("--engine", engine, "--workload", "humaneval", "--cache-dir", str(cache), code=1)
    assert "`make peers` installs it" in text


def test_words_that_can_not_be(tmp_path: Path) -> None:
    text = invoke("--json", str(tmp_path / "no" / "a.json"), code=2)
    assert f"--json: {tmp_path / 'no'} is not a folder" in text


@pytest.mark.model
def test_ctrl_c_leaves_what_was_answered(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, names = HttpPeer.ask, set[str]()

    async def interrupted(peer: HttpPeer, asked: LoadRequest) -> Record:
        names.add(asked.name)
        if len(names) == 3:  # a warm-up and a prompt before
            signal.raise_signal(signal.SIGINT)
        return await ask(peer, asked)

    monkeypatch.setattr(HttpPeer, "ask", interrupted)
    out = fakes / "out.json"
    words = ["--engine", "specdec", "--workload", "humaneval", "--prompts", "9", "--max-tokens", "6"]
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        text = invoke(*words, "--json", str(out), code=130)
    finally:
        signal.signal(signal.SIGINT, former)
    assert "**humaneval**" in text
    assert "the report has what was measured until then" in text
    report = json.loads(out.read_text())
    assert report["stopped"] is True
    assert report["machine"]["read_bandwidth_gb_s"] == 40.0
    assert sum(arm["answered"] for arm in report["workloads"]["humaneval"].values()) == 1
