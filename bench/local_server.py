"""A server of our own in a child process: its CPU time, its memory, and tasks that observe a run of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from types import TracebackType
from typing import Self

import psutil

from specdec.child_python import module_command, module_environment
from specdec.config import Config
from specdec.errors import SpecdecError

_TAIL_BYTES = 2000
_STOP_S = 30.0


class ChildServerError(SpecdecError):
    """The server to measure did not start; the message holds its last words."""


class ChildServer:
    """``python -m module words``, which prints its ports as one line of JSON when it is ready and ends when its input
    does. Use as ``async with``: it is ready inside."""

    def __init__(self, module: str, *words: str) -> None:
        self._command = [*module_command(module), *words]
        self._process: asyncio.subprocess.Process | None = None
        self.grpc_port = self.http_port = 0

    @property
    def grpc_address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def frontend(self) -> psutil.Process:
        """The process that has the ports."""
        assert self._process is not None  # it is used inside ``async with``
        return psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        """Seconds of a core that the front end has used so far."""
        times = self.frontend.cpu_times()
        return float(times.user + times.system)

    async def __aenter__(self) -> Self:
        with tempfile.TemporaryFile() as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=module_environment(),
            )  # fmt: skip
            assert self._process.stdout is not None  # it was asked for as a pipe
            line = await self._process.stdout.readline()
            if not line:
                await self._process.wait()
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                raise ChildServerError(f"the server did not start: {log.read().decode('utf-8', 'replace').strip()}")
        ports = json.loads(line)
        self.grpc_port, self.http_port = ports["grpc_port"], ports["http_port"] or 0
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End it as an operator would, and wait for that; nothing where it has ended."""
        assert self._process is not None  # it is used inside ``async with``
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


class LocalServer(ChildServer):
    """Use as ``async with``: it is ready inside. Ports of 0 in ``config`` are of the system's choice.

    factory, tokenizer: ``module:function``, instead of the real engine's and the target's.
    """

    def __init__(self, config: Config, *, factory: str | None = None, tokenizer: str | None = None) -> None:
        words = ["--config", config.model_dump_json()]
        words += ["--factory", factory] if factory else []
        words += ["--tokenizer", tokenizer] if tokenizer else []
        super().__init__("bench.server_process", *words)

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        return next(child for child in self.frontend.children() if "server.engine_process" in child.cmdline())

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes that belong to each process alone."""
        parts = {"frontend": self.frontend, "engine": self.engine}
        return {name: int(process.memory_full_info().uss) for name, process in parts.items()}


class BackgroundWatch:
    """Use as ``async with`` around the run; `_watch` goes on beside it and is cancelled behind it."""

    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch(), name=type(self).__name__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None  # set on entering
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        raise NotImplementedError
