"""An engine in a process of its own: started, stopped and continued, asked over HTTP or through a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.peers.peer import Answer, Arm, PeerError, PeerPrompt
from bench.serve.endpoints import EndpointError, OpenAIEndpoint, StatusError
from specdec.load.request import LoadRequest, Record, RefusedError

_LAUNCHER = Path(__file__).with_name("launcher.py")
_LINE_BYTES = 1 << 24
_TAIL_BYTES = 4000
_SAID_LINES = 3
_END_S, _KILL_S, _EXIT_POLL_S = 10.0, 10.0, 0.02


class PeerProcess:
    """``words``: the command. ``env`` is added to ours. What it prints goes to the file ``log``; with ``pipes`` its
    standard input and output are ours, and only its errors go there."""

    def __init__(self, words: Seq[str], env: Mapping[str, str], log: Path, *, pipes: bool = False) -> None:
        self.words, self._env, self._log, self._pipes = tuple(words), dict(env), log, pipes
        self._process: asyncio.subprocess.Process | None = None
        self._known: dict[int, psutil.Process] = {}

    @property
    def running(self) -> bool:
        """Whether it was begun and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def writer(self) -> asyncio.StreamWriter:
        """Its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None  # asked for with ``pipes``
        return self._process.stdin

    @property
    def reader(self) -> asyncio.StreamReader:
        """Its standard output."""
        assert self._process is not None
        assert self._process.stdout is not None  # asked for with ``pipes``
        return self._process.stdout

    async def begin(self) -> None:
        """Start it, in a session of its own.

        Raises:
            PeerError: the system refuses.
        """
        self._log.parent.mkdir(parents=True, exist_ok=True)
        inner = asyncio.subprocess.PIPE if self._pipes else asyncio.subprocess.DEVNULL
        try:
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", str(_LAUNCHER), str(os.getpid()), *self.words, stdin=inner,
                    stdout=asyncio.subprocess.PIPE if self._pipes else log, stderr=log, limit=_LINE_BYTES,
                    start_new_session=True, env=_without_path() | self._env,
                )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{self.words[0]}: {error.strerror or error}") from None

    def log_tail(self) -> str:
        """The end of what it printed, on one line; what looks like an error first of all."""
        try:
            data = self._log.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return "it printed nothing"
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        return " / ".join(errors[-_SAID_LINES:]) or "it printed nothing"

    def pause(self) -> None:
        """Stop the process and its descendants, parents first: they start no child any more then.

        Raises:
            PeerError: it has ended.
        """
        self._require()
        self._signal(signal.SIGSTOP, self._process_tree())

    def resume(self) -> None:
        """Continue all processes, children first, so that no parent misses an answer.

        Raises:
            PeerError: it has ended.
        """
        self._require()
        self._signal(signal.SIGCONT, self._process_tree()[::-1])

    async def end(self) -> None:
        """Ask the process to end, and kill what is left of it and its descendants."""
        if self._process is None:
            return
        processes = self._process_tree()
        self._signal(signal.SIGTERM, processes[:1])  # a stopped process hears it once it is continued
        self._signal(signal.SIGCONT, processes[::-1])
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
        finally:
            left = {process.pid: process for process in (*processes, *self._process_tree())}
            self._signal(signal.SIGKILL, list(left.values()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _KILL_S)
            await _until_gone(list(left.values()))
            self._known.clear()

    def _require(self) -> None:
        if not self.running:
            raise PeerError(f"it ended by itself: {self.log_tail()}")

    def _process_tree(self) -> list[psutil.Process]:
        """The process, its descendants, and those who were once seen or are of its session, as far as they live."""
        assert self._process is not None  # callers have begun it
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            for process in (first, *first.children(recursive=True)):
                self._known.setdefault(process.pid, process)
        for process in psutil.process_iter():
            with suppress(OSError):
                if process.pid not in self._known and os.getsid(process.pid) == self._process.pid:
                    self._known[process.pid] = process
        return [process for process in self._known.values() if process.is_running()]

    @staticmethod
    def _signal(number: signal.Signals, processes: Seq[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _without_path() -> dict[str, str]:
    """Our environment, but for where our Python finds its modules: a peer has its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


async def _until_gone(processes: Seq[psutil.Process]) -> None:
    """Killed ones take a moment; those whose parent has died may stay as zombies, which hold nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            while any(_holds_memory(process) for process in processes):
                await asyncio.sleep(_EXIT_POLL_S)


def _holds_memory(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Fields = Callable[[PeerPrompt], dict[str, Any]]
_READY_POLL_S = 0.2


def no_fields(prompt: PeerPrompt) -> dict[str, Any]:
    """No fields besides those that every engine receives."""
    return {}


class _ProcessPeer:
    """What peers have in common that are a process: its pauses, its end, its description."""

    def __init__(
        self, arms: Seq[Arm], words: Seq[str], env: Mapping[str, str] | None, needs_bytes: int, about: dict[str, Any]
    ) -> None:
        self.arms: Seq[Arm] = tuple(arms)
        self.needs_bytes = needs_bytes
        self._words, self._env, self._about = tuple(words), dict(env or {}), about
        self._process: PeerProcess | None = None

    @property
    def _started(self) -> PeerProcess:
        assert self._process is not None  # callers have started it
        return self._process

    def pause(self) -> None:
        """As `Peer.pause`."""
        self._started.pause()

    def resume(self) -> None:
        """As `Peer.resume`."""
        self._started.resume()

    async def end(self) -> None:
        """As `Peer.end`."""
        if self._process is not None:
            await self._process.end()

    def facts(self) -> dict[str, Any]:
        """As `Peer.facts`."""
        env = [f"{name}={value}" for name, value in self._env.items() if name != "PATH"]
        return {**self._about, "command": [*env, *self._words]}


class HttpPeer(_ProcessPeer):
    """One server process of one arm.

    words: its command; "{port}" stands for the port it is to listen on. env: added to ours. fields: beside what every
    engine is asked. model: as the server calls it. start_s, answer_s: longest it may take to load, to answer.
    """

    def __init__(
        self, arm: Arm, words: Seq[str], log: Path, *, env: Mapping[str, str] | None = None, fields: Fields = no_fields,
        model: str = "", needs_bytes: int = 0, start_s: float = 300.0, answer_s: float = 180.0, about: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__((arm,), words, env, needs_bytes, about)
        self._log, self._fields, self._model, self._base = log, fields, model, ""
        self._start_s, self._answer_s = start_s, answer_s

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
            raise PeerError(f"not ready after {self._start_s:g} s: {self._process.log_tail()}") from None
        except BaseException:
            await self.end()
            raise

    async def ask(self, arm: Arm, prompt: PeerPrompt) -> Answer:
        """As `Peer.ask`."""
        clock = asyncio.get_running_loop().time
        fixed = prompt.fixed
        ask = LoadRequest(
            prompt.name, prompt.max_tokens, ids=prompt.ids, stop=() if fixed else prompt.stop, fixed=fixed
        )
        extra = self._fields(prompt)
        if prompt.stop_ids and not fixed:
            extra = {"stop_token_ids": list(prompt.stop_ids)} | extra
        # A connection of its own for every answer: one that slept through a pause may be closed by the server.
        endpoint = OpenAIEndpoint(f"{self._base}/v1", model=self._model, extra=extra)
        try:
            async with asyncio.timeout(self._answer_s):
                record = Record(prompt.name, clock())
                await endpoint.send(ask, record)
                record.end_s = record.last_s  # closing the connection is not decoding time
        except TimeoutError:
            raise PeerError(f"no answer within {self._answer_s:g} s") from None
        except (StatusError, RefusedError) as error:
            return Answer(error=str(error))
        except EndpointError as error:
            ended = "" if self._started.running else f": {self._started.log_tail()}"
            raise PeerError(f"{error}{ended}") from None
        finally:
            await endpoint.close()
        return answer_of(record)

    async def _until_ready(self, process: PeerProcess) -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                if not process.running:
                    raise PeerError(f"it ended before it was ready: {process.log_tail()}")
                try:
                    if (await client.get(f"{self._base}/health", timeout=5.0)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # it does not listen yet; whether it still runs is asked above
                await asyncio.sleep(_READY_POLL_S)


def answer_of(record: Record) -> Answer:
    """What a stream came to that has ended.

    Raises:
        PeerError: it did not say how many tokens there are.
    """
    if not record.prompt_tokens:
        raise PeerError("the stream ended without its usage")
    return Answer(record.output_tokens, record.ttft_ms, record.e2e_ms, record.text)


class PipePeer(_ProcessPeer):
    """One process for several arms: what it answers with depends on the ask alone, it remembers nothing.

    arms: with what the script calls each of them. words: its command. start_s, answer_s: longest it may take to load,
    to answer.
    """

    def __init__(
        self, arms: Mapping[Arm, str], words: Seq[str], log: Path, *, env: Mapping[str, str] | None = None,
        needs_bytes: int = 0, start_s: float = 300.0, answer_s: float = 180.0, about: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(tuple(arms), words, env, needs_bytes, about)
        self._modes, self._start_s, self._answer_s = dict(arms), start_s, answer_s
        self._process = PeerProcess(self._words, self._env, log, pipes=True)

    async def start(self) -> None:
        """As `Peer.start`."""
        try:
            await self._started.begin()
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
            self._started.writer.write(json.dumps(question).encode() + b"\n")
            await self._started.writer.drain()
        except ConnectionError:
            raise PeerError(f"it ended by itself: {self._started.log_tail()}") from None
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

    async def _line(self, limit_s: float, what: str) -> dict[str, Any]:
        """The next line of the script, an object."""
        try:
            async with asyncio.timeout(limit_s):
                line = await self._started.reader.readline()
        except TimeoutError:
            raise PeerError(f"{what} after {limit_s:g} s: {self._started.log_tail()}") from None
        except ValueError:
            raise PeerError("its answer is too long to be read") from None
        if not line.endswith(b"\n"):
            raise PeerError(f"it ended by itself: {self._started.log_tail()}")
        try:
            found = json.loads(line)
        except ValueError:
            raise PeerError(f"its answer is no JSON: {line[:200]!r}") from None
        if not isinstance(found, dict):
            raise PeerError(f"its answer is no object: {line[:200]!r}")
        return found
