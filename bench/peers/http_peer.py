"""An engine that is asked over OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import httpx

from bench.peers.answer import Answer
from bench.peers.arm import Arm
from bench.peers.completion_stream import CompletionStream
from bench.peers.peer_error import PeerError
from bench.peers.peer_process import PeerProcess
from bench.peers.peer_prompt import PeerPrompt

Fields = Callable[[PeerPrompt], dict[str, Any]]
_POLL_S = 0.2
_SHOWN = 300


def no_fields(prompt: PeerPrompt) -> dict[str, Any]:
    """Nothing beside what every engine is asked."""
    return {}


class HttpPeer:
    """One server process of one arm.

    words: its command; "{port}" stands for the port it is to listen on. env: added to ours. fields: beside what every
    engine is asked. model: as the server calls it. start_s, answer_s: longest it may take to load, to answer.
    """

    def __init__(
        self, arm: Arm, words: Seq[str], log: Path, *, env: Mapping[str, str] | None = None, fields: Fields = no_fields,
        model: str = "", needs_bytes: int = 0, start_s: float = 300.0, answer_s: float = 180.0, about: dict[str, Any],
    ) -> None:  # fmt: skip
        self.arms: Seq[Arm] = (arm,)
        self.needs_bytes = needs_bytes
        self._words, self._log, self._env, self._fields, self._model = tuple(words), log, dict(env or {}), fields, model
        self._start_s, self._answer_s, self._about = start_s, answer_s, about
        self._process: PeerProcess | None = None
        self._base = ""

    async def start(self) -> None:
        """As `Peer.start`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in self._words]
        self._process = PeerProcess(words, self._env, self._log)
        try:
            await self._process.begin()
            async with asyncio.timeout(self._start_s):
                await self._until_ready(self._process)
        except TimeoutError:
            await self.end()
            raise PeerError(f"not ready after {self._start_s:g} s: {self._process.last_words()}") from None
        except BaseException:
            await self.end()
            raise

    async def ask(self, arm: Arm, prompt: PeerPrompt) -> Answer:
        """As `Peer.ask`."""
        clock = asyncio.get_running_loop().time
        try:
            # A connection of its own for every answer: one that slept through a pause may be closed by the server.
            async with asyncio.timeout(self._answer_s), _client() as client:
                stream = CompletionStream(clock())
                async with client.stream("POST", f"{self._base}/v1/completions", json=self._body(prompt)) as answer:
                    if answer.status_code != 200:
                        said = (await answer.aread()).decode("utf-8", "replace")[:_SHOWN]
                        return Answer(error=f"HTTP {answer.status_code}: {said}")
                    async for line in answer.aiter_lines():
                        stream.feed(line, clock())
                return stream.answer()
        except TimeoutError:
            raise PeerError(f"no answer within {self._answer_s:g} s") from None
        except httpx.HTTPError as error:
            said = f": {self._process.last_words()}" if self._process is not None and not self._process.running else ""
            raise PeerError(f"{type(error).__name__} {error}{said}".strip()) from None

    def pause(self) -> None:
        """As `Peer.pause`."""
        assert self._process is not None  # it was started
        self._process.pause()

    def resume(self) -> None:
        """As `Peer.resume`."""
        assert self._process is not None  # it was started
        self._process.resume()

    async def end(self) -> None:
        """As `Peer.end`."""
        if self._process is not None:
            await self._process.end()

    def facts(self) -> dict[str, Any]:
        """As `Peer.facts`."""
        env = [f"{name}={value}" for name, value in self._env.items() if name != "PATH"]
        return {**self._about, "command": [*env, *self._words]}

    async def _until_ready(self, process: PeerProcess) -> None:
        async with _client() as client:
            while True:
                if not process.running:
                    raise PeerError(f"it ended before it was ready: {process.last_words()}")
                try:
                    if (await client.get(f"{self._base}/health", timeout=5.0)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # it does not listen yet; whether it still runs is asked above
                await asyncio.sleep(_POLL_S)

    def _body(self, prompt: PeerPrompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": list(prompt.ids), "max_tokens": prompt.max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._model:
            body["model"] = self._model
        if prompt.fixed:
            body["ignore_eos"] = True
        elif prompt.stop:
            body["stop"] = list(prompt.stop)
        if prompt.stop_ids and not prompt.fixed:
            body["stop_token_ids"] = list(prompt.stop_ids)
        return body | self._fields(prompt)


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=limits)
