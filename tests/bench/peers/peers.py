"""Peers for tests: fake servers in child processes, and peers without a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.peers.peer import Answer, Arm, PeerError, PeerPrompt
from bench.peers.peer_process import Fields, HttpPeer, no_fields

FAKE = Path(__file__).with_name("fake_server.py")


def arm(name: str, engine: str = "other", plain: str | None = None) -> Arm:
    return Arm(name, engine, "int8", plain or name)


def prompts(number: int, workload: str = "chat", **more: Any) -> list[PeerPrompt]:
    return [PeerPrompt(workload, f"{workload}/{i}", (1, 2, i), 4, counted=i > 0, **more) for i in range(number)]


def server(
    name: str, folder: Path, *words: str, fields: Fields = no_fields, start_s: float = 60.0, answer_s: float = 60.0
) -> HttpPeer:
    """A fake server that logs its requests for `asks_in`."""
    command = [sys.executable, "-I", str(FAKE), "--port", "{port}", "--name", name, "--log", str(folder / "asks.jsonl")]
    return HttpPeer(
        arm(name), [*command, *words], folder / f"{name}.log", fields=fields, start_s=start_s, answer_s=answer_s,
        version="fake 1",
    )  # fmt: skip


def asks_in(folder: Path) -> list[dict[str, Any]]:
    file = folder / "asks.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Actor:
    """A peer that only records the calls in ``calls``. ``breaks``: the method that fails."""

    def __init__(self, name: str, calls: list[str], *, breaks: str = "", needs_bytes: int = 0) -> None:
        self.arm, self.needs_bytes = arm(name), needs_bytes
        self._name, self._calls, self.breaks = name, calls, breaks

    def _call(self, what: str) -> None:
        self._calls.append(f"{what} {self._name}")
        if self.breaks == what:
            raise PeerError(f"can not {what}")

    async def start(self) -> None:
        self._call("start")

    async def ask(self, prompt: PeerPrompt) -> Answer:
        if self.breaks == "ask" and prompt.counted:
            raise PeerError("can not ask")
        self._calls.append(f"{self._name} {prompt.name}{'' if prompt.counted else ' (warm)'}")
        return Answer(prompt.max_tokens, 10.0, 40.0, f"text of {prompt.name}")

    def pause(self) -> None:
        self._call("pause")

    def resume(self) -> None:
        self._call("resume")

    async def end(self) -> None:
        self._calls.append(f"end {self._name}")

    def facts(self) -> dict[str, Any]:
        return {"version": "1", "command": [self._name]}
