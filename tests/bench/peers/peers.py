"""Peers for tests: fake servers in child processes, and peers without a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.peers.peer import Arm, PeerError
from bench.peers.peer_process import HttpPeer
from specdec.load.request import LoadRequest, Record

FAKE = Path(__file__).with_name("fake_server.py")


def arm(name: str, engine: str = "other", plain: str | None = None) -> Arm:
    return Arm(name, engine, "int8", plain or name)


def prompts(number: int, workload: str = "chat", **more: Any) -> list[LoadRequest]:
    return [LoadRequest(f"{workload}/{i}", 4, ids=(1, 2, i), counted=i > 0, **more) for i in range(number)]


def answer(tokens: int, ttft_ms: float, e2e_ms: float, text: str = "", **more: Any) -> Record:
    """An answer that was asked for at time 0."""
    return Record(
        "x", 0.0, end_s=e2e_ms / 1e3, chunk_s=[ttft_ms / 1e3], prompt_tokens=1, output_tokens=tokens, text=text, **more
    )


def server(
    name: str, folder: Path, *words: str, hints: bool = False, start_s: float = 60.0, answer_s: float = 60.0
) -> HttpPeer:
    """A fake server that logs its requests for `asks_in`."""
    command = [sys.executable, "-I", str(FAKE), "--port", "{port}", "--name", name, "--log", str(folder / "asks.jsonl")]
    return HttpPeer(
        arm(name), [*command, *words], folder / f"{name}.log", hints=hints, start_s=start_s, answer_s=answer_s,
        version="fake 1",
    )  # fmt: skip


def asks_in(folder: Path) -> list[dict[str, Any]]:
    file = folder / "asks.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Actor:
    """A peer that only records the calls in ``calls``. ``breaks``: the method that fails, "ask" from the second call
    on."""

    def __init__(self, name: str, calls: list[str], *, breaks: str = "", needs_bytes: int = 0) -> None:
        self.arm, self.needs_bytes = arm(name), needs_bytes
        self._name, self._calls, self.breaks, self._asked = name, calls, breaks, 0

    def _call(self, what: str) -> None:
        self._calls.append(f"{what} {self._name}")
        if self.breaks == what:
            raise PeerError(f"cannot {what}")

    async def start(self) -> None:
        self._call("start")

    async def ask(self, ask: LoadRequest) -> Record:
        self._asked += 1
        if self.breaks == "ask" and self._asked > 1:
            raise PeerError("cannot ask")
        self._calls.append(f"{self._name} {ask.name}")
        return answer(ask.max_tokens, 10.0, 40.0, f"text of {ask.name}")

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    async def end(self) -> None:
        self._calls.append(f"end {self._name}")

    def facts(self) -> dict[str, Any]:
        return {"version": "1", "command": [self._name]}
