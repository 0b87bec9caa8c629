"""An engine in its own process: started, paused, resumed, ended, and queried over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.peers.peer import Arm, PeerError
from bench.serve.endpoints import EndpointError, OpenAIEndpoint, StatusError
from cluster.replica_process import free_ports
from specdec.child_python import die_with_parent
from specdec.load.request import LoadRequest, Record, RefusedError

_TAIL_BYTES = 4000
_TAIL_LINES = 3
_READY_POLL_S, _END_S, _KILL_S, _EXIT_POLL_S = 0.2, 10.0, 10.0, 0.02


@dataclass(eq=False)
class HttpPeer:
    """The process of one arm: a server with OpenAI's API, in a session of its own.

    Every method but `end` and `facts` raises PeerError if the process is gone.
    """

    arm: Arm
    words: Seq[str]  # the command; "{port}" stands for the port
    log: Path  # its output
    _: KW_ONLY
    version: str  # for the report
    env: dict[str, str] = field(default_factory=dict)  # added to our environment
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of every request's body
    hints: bool = False  # the engine gets predictions and sessions
    model: str = ""  # the server's name of the model
    needs_bytes: int = 0  # memory that it will allocate, approximately
    start_s: float = 300.0  # time limit of loading
    answer_s: float = 180.0  # and of one answer
    base: str = field(default="", init=False)  # URL of the running server
    _process: asyncio.subprocess.Process | None = field(default=None, init=False)
    """Stays None for a server that runs already."""

    async def start(self) -> None:
        """Start the process and wait until it accepts prompts; on an error nothing of it is left running."""
        (port,) = free_ports("127.0.0.1", 1)
        self.base = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in self.words]
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has its own modules
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *words, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=ours | self.env,
                    start_new_session=True, preexec_fn=die_with_parent,  # a paused one would keep its memory for ever
                )  # fmt: skip
        except OSError as error:
            raise PeerError(f"{words[0]}: {error.strerror or error}") from None
        try:
            async with asyncio.timeout(self.start_s):
                await self._until_ready()
        except TimeoutError:
            await self.end()
            raise PeerError(f"not ready after {self.start_s:g} s: {self._log_tail()}") from None
        except BaseException:
            await self.end()
            raise

    async def ask(self, ask: LoadRequest) -> Record:
        """The answer to one prompt; its outcome is "refused" if the engine refuses the prompt."""
        extra = self.extra
        if not self.hints:
            ask = replace(ask, prediction="")
        elif ask.session:
            extra = extra | {"session": ask.session}
        # A new connection for every answer: the server may close one that was idle during a pause.
        endpoint = OpenAIEndpoint(f"{self.base}/v1", model=self.model, extra=extra)
        record = Record(ask.name, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self.answer_s):
                await endpoint.send(ask, record)
        except TimeoutError:
            raise PeerError(f"no answer within {self.answer_s:g} s") from None
        except (StatusError, RefusedError) as error:
            record.outcome, record.error = "refused", str(error)
            return record
        except EndpointError as error:
            ended = "" if self._running else f": {self._log_tail()}"
            raise PeerError(f"{error}{ended}") from None
        finally:
            await endpoint.close()
        if not record.prompt_tokens:
            raise PeerError("the stream ended without its usage")
        record.end_s = record.last_s  # closing the connection is not decoding time
        return record

    def pause(self) -> None:
        """Stop the process and its descendants, so that they take no time from other engines."""
        _signal(signal.SIGSTOP, self._process_tree())  # parents first, so that none can start another

    def resume(self) -> None:
        """Continue the stopped processes."""
        _signal(signal.SIGCONT, self._process_tree()[::-1])

    async def end(self) -> None:
        """Terminate the process, in any state, then kill what is left of it and its descendants. May be called more
        than once."""
        process = self._process
        if process is None:
            return
        tree = self._process_tree() if self._running else []
        _signal(signal.SIGTERM, tree[:1])  # a stopped process receives it when it is continued
        _signal(signal.SIGCONT, tree[::-1])
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        finally:
            _signal(signal.SIGKILL, tree)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that it started meanwhile, or left behind
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_S)
            await _until_gone(tree)

    def facts(self) -> dict[str, Any]:
        """Version and command for the report, as JSON types."""
        env = [f"{name}={value}" for name, value in self.env.items() if name != "PATH"]
        return {"version": self.version, "command": [*env, *self.words]}

    async def _until_ready(self) -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            while True:
                if not self._running:
                    raise PeerError(f"the process ended before it was ready: {self._log_tail()}")
                try:
                    if (await client.get(f"{self.base}/health", timeout=5.0)).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # it does not listen yet
                await asyncio.sleep(_READY_POLL_S)

    @property
    def _running(self) -> bool:
        return self._process is None or self._process.returncode is None

    def _process_tree(self) -> list[psutil.Process]:
        """The process and its descendants, parents first; empty for a server that runs already.

        Raises:
            PeerError: it has ended.
        """
        if not self._running:
            raise PeerError(f"the process ended: {self._log_tail()}")
        if self._process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def _log_tail(self) -> str:
        """The end of the log on one line; lines with errors if there are any."""
        try:
            data = self.log.read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return "it printed nothing"
        lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        return " / ".join(errors[-_TAIL_LINES:]) or "it printed nothing"


def _signal(number: signal.Signals, processes: Seq[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def _until_gone(processes: Seq[psutil.Process]) -> None:
    """Wait until the killed processes have released their memory. A zombie has."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            while any(_holds_memory(process) for process in processes):
                await asyncio.sleep(_EXIT_POLL_S)


def _holds_memory(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
