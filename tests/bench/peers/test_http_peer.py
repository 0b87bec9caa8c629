"""A server as a peer, with real processes: requests, pause, resume and end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.peers.peer import PeerError
from bench.peers.peer_process import HttpPeer
from bench.serve.endpoints import OpenAIEndpoint
from specdec.load.request import LoadRequest, Record
from tests.bench.peers.peers import asks_in, server

PROMPT = LoadRequest("chat/1", 4, ids=(5, 6, 7), stop=("\n\n",), stop_ids=(9,), prediction="old", session="s")


def living(folder: Path) -> list[int]:
    """Processes of this test that have not ended."""
    return [pid for pid in {int(ask["pid"]) for ask in asks_in(folder)} if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def started(peer: HttpPeer) -> HttpPeer:
    await peer.start()
    return peer


async def test_it_is_asked_for_ids_and_its_answer_is_read(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path))
    try:
        answer = await peer.ask(PROMPT)
    finally:
        await peer.end()
    assert (answer.output_tokens, answer.text, answer.ok) == (4, "word " * 4, True)
    assert 0 < answer.ttft_ms <= answer.e2e_ms
    (ask,) = asks_in(tmp_path)
    assert ask["prompt"] == [5, 6, 7]
    assert (ask["max_tokens"], ask["temperature"]) == (4, 0)
    assert (ask["stop"], ask["stop_token_ids"]) == (["\n\n"], [9])
    assert "ignore_eos" not in ask
    assert living(tmp_path) == []


async def test_only_an_engine_that_takes_hints_gets_the_prediction_and_the_session(tmp_path: Path) -> None:
    for name, hints in (("a", True), ("b", False)):
        peer = await started(server(name, tmp_path, hints=hints))
        try:
            await peer.ask(PROMPT)
        finally:
            await peer.end()
    with_hints, without = asks_in(tmp_path)
    assert (with_hints["prediction"], with_hints["session"]) == ({"type": "content", "content": "old"}, "s")
    assert not {"prediction", "session"} & set(without)


async def test_an_answer_of_fixed_length_has_no_stops(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path))
    try:
        await peer.ask(PROMPT.of_fixed_length())
    finally:
        await peer.end()
    (ask,) = asks_in(tmp_path)
    assert ask["ignore_eos"] is True
    assert not {"stop", "stop_token_ids"} & set(ask)


async def test_a_stopped_one_does_nothing_until_it_is_continued(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path))
    try:
        await peer.ask(PROMPT)
        (pid,) = living(tmp_path)
        peer.pause()
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(peer.ask(PROMPT))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        peer.resume()
        assert (await waiting).output_tokens == 4
        peer.pause()
    finally:
        await peer.end()  # a stopped one too
    assert living(tmp_path) == []


async def test_a_stream_that_was_cut_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(self: OpenAIEndpoint, ask: LoadRequest, record: Record) -> None:
        record.text = "a"

    monkeypatch.setattr(OpenAIEndpoint, "send", send)
    with pytest.raises(PeerError, match="usage"):
        await server("a", tmp_path).ask(PROMPT)


async def test_a_refused_prompt_is_that_prompt_s_matter(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path, "--refuse-at", "1"))
    try:
        assert (await peer.ask(PROMPT)).error == "HTTP 400: that prompt is too long"
        assert (await peer.ask(PROMPT)).error == ""
    finally:
        await peer.end()


async def test_one_that_dies_tells_its_last_words(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path, "--die-at", "1"))
    try:
        with pytest.raises(PeerError):
            await peer.ask(PROMPT)
        while living(tmp_path):
            await asyncio.sleep(0.01)
        with pytest.raises(PeerError, match="out of luck"):
            await _until_noticed(peer)
    finally:
        await peer.end()


async def _until_noticed(peer: HttpPeer) -> None:
    """Wait until the event loop has noticed the end of the child."""
    while True:
        peer.pause()
        await asyncio.sleep(0.01)


async def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    peer = await started(server("a", tmp_path, "--hang-at", "1", answer_s=0.3))
    try:
        with pytest.raises(PeerError, match=r"no answer within 0\.3 s"):
            await peer.ask(PROMPT)
    finally:
        await peer.end()
    assert living(tmp_path) == []


async def test_one_that_can_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"the process ended before it was ready: error: no such model"):
        await server("a", tmp_path, "--fail").start()


async def test_one_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"not ready after 1 s"):
        await server("a", tmp_path, "--never-ready", start_s=1.0).start()
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(tmp_path) in command]


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    peer = server("a", tmp_path)
    peer.words = (str(tmp_path / "nothing"),)
    with pytest.raises(PeerError, match="nothing"):
        await peer.start()


async def test_deaf_processes_and_their_children_are_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.peers.peer_process._END_S", 0.2)
    peer = await started(server("a", tmp_path, "--deaf"))
    await peer.ask(PROMPT)
    assert len(living(tmp_path)) == 2
    await peer.end()
    assert living(tmp_path) == []


def test_peers_die_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    """A paused one too."""
    code = (
        "import asyncio, sys, pathlib\n"
        "from tests.bench.peers.peers import server\n"
        "from tests.bench.peers.test_http_peer import PROMPT\n"
        "async def main():\n"
        "    peer = server('a', pathlib.Path(sys.argv[1]))\n"
        "    await peer.start()\n"
        "    await peer.ask(PROMPT)\n"
        "    peer.pause()\n"
        "    print('paused', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == b"paused\n"
        assert len(living(tmp_path)) == 1
        bench.send_signal(signal.SIGKILL)
    while living(tmp_path):
        time.sleep(0.01)
