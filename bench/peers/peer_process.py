"""The processes of one peer: begun, stopped and continued, and ended in any case."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

import psutil

from bench.peers.peer_error import PeerError

_LAUNCHER = Path(__file__).with_name("launcher.py")
_LINE_BYTES = 1 << 24
_TAIL_BYTES = 4000
_SAID_LINES = 3
_END_S, _KILL_S, _POLL_S = 10.0, 10.0, 0.02


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

    def last_words(self) -> str:
        """The end of what it printed, on one line; what looks like an error first of all."""
        try:
            data = self._log.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return "it printed nothing"
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        told = [line for line in lines if "error" in line.lower()] or lines
        return " / ".join(told[-_SAID_LINES:]) or "it printed nothing"

    def pause(self) -> None:
        """Stop the whole family, parents first: they start no child any more then.

        Raises:
            PeerError: it has ended.
        """
        self._require()
        self._signal(signal.SIGSTOP, self._family())

    def resume(self) -> None:
        """Continue the whole family, children first: nobody misses an answer.

        Raises:
            PeerError: it has ended.
        """
        self._require()
        self._signal(signal.SIGCONT, self._family()[::-1])

    async def end(self) -> None:
        """Ask the family to end, and kill what is left of it."""
        if self._process is None:
            return
        family = self._family()
        self._signal(signal.SIGTERM, family[:1])  # a stopped process hears it once it is continued
        self._signal(signal.SIGCONT, family[::-1])
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
        finally:
            left = {process.pid: process for process in (*family, *self._family())}
            self._signal(signal.SIGKILL, list(left.values()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _KILL_S)
            await _until_gone(list(left.values()))
            self._known.clear()

    def _require(self) -> None:
        if not self.running:
            raise PeerError(f"it ended by itself: {self.last_words()}")

    def _family(self) -> list[psutil.Process]:
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
                await asyncio.sleep(_POLL_S)


def _holds_memory(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
