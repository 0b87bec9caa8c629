"""An engine behind a small script of ours that runs in its environment and is asked in lines of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from bench.peers.answer import Answer
from bench.peers.arm import Arm
from bench.peers.peer_error import PeerError
from bench.peers.peer_process import PeerProcess
from bench.peers.peer_prompt import PeerPrompt


class PipePeer:
    """One process for several arms: what it answers with depends on the ask alone, it remembers nothing.

    arms: with what the script calls each of them. words: its command. start_s, answer_s: longest it may take to load,
    to answer.
    """

    def __init__(
        self, arms: Mapping[Arm, str], words: Seq[str], log: Path, *, env: Mapping[str, str] | None = None,
        needs_bytes: int = 0, start_s: float = 300.0, answer_s: float = 180.0, about: dict[str, Any],
    ) -> None:  # fmt: skip
        self.arms: Seq[Arm] = tuple(arms)
        self.needs_bytes = needs_bytes
        self._modes, self._words, self._env = dict(arms), tuple(words), dict(env or {})
        self._start_s, self._answer_s, self._about = start_s, answer_s, about
        self._process = PeerProcess(self._words, self._env, log, pipes=True)

    async def start(self) -> None:
        """As `Peer.start`."""
        try:
            await self._process.begin()
            await self._line(self._start_s, "not ready")
        except BaseException:
            await self.end()
            raise

    async def ask(self, arm: Arm, prompt: PeerPrompt) -> Answer:
        """As `Peer.ask`. Times are the script's own, so pipes cost nothing."""
        question = {
            "mode": self._modes[arm], "ids": prompt.ids, "max_tokens": prompt.max_tokens,
            "stop": () if prompt.fixed else prompt.stop, "stop_ids": () if prompt.fixed else prompt.stop_ids,
            "fixed": prompt.fixed,
        }  # fmt: skip
        try:
            self._process.writer.write(json.dumps(question).encode() + b"\n")
            await self._process.writer.drain()
        except ConnectionError:
            raise PeerError(f"it ended by itself: {self._process.last_words()}") from None
        found = await self._line(self._answer_s, "no answer")
        try:
            if found.get("error"):
                return Answer(error=str(found["error"]))
            return Answer(
                int(found["tokens"]), float(found["ttft_ms"]), float(found["e2e_ms"]), str(found["text"]),
                int(found["first_tokens"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            raise PeerError(f"its answer can not be read: {str(found)[:200]}") from None

    def pause(self) -> None:
        """As `Peer.pause`."""
        self._process.pause()

    def resume(self) -> None:
        """As `Peer.resume`."""
        self._process.resume()

    async def end(self) -> None:
        """As `Peer.end`."""
        await self._process.end()

    def facts(self) -> dict[str, Any]:
        """As `Peer.facts`."""
        env = [f"{name}={value}" for name, value in self._env.items()]
        return {**self._about, "command": [*env, *self._words]}

    async def _line(self, limit_s: float, what: str) -> dict[str, Any]:
        """The next line of the script, an object."""
        try:
            async with asyncio.timeout(limit_s):
                line = await self._process.reader.readline()
        except TimeoutError:
            raise PeerError(f"{what} after {limit_s:g} s: {self._process.last_words()}") from None
        except ValueError:
            raise PeerError("its answer is too long to be read") from None
        if not line.endswith(b"\n"):
            raise PeerError(f"it ended by itself: {self._process.last_words()}")
        try:
            found = json.loads(line)
        except ValueError:
            raise PeerError(f"its answer is no JSON: {line[:200]!r}") from None
        if not isinstance(found, dict):
            raise PeerError(f"its answer is no object: {line[:200]!r}")
        return found
