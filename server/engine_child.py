"""One run of the engine process, seen from the front end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import deque

from server.frame_link import FrameLink
from server.frames import Frame
from specdec.config import EngineConfig

_LOG = logging.getLogger("specdec.engine_process")
_TAIL_LINES = 60
_LINGER_S = 2.0


class EngineChild:
    """The process, its socket (``link``), and the tail of what it printed. Make one with `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, link: FrameLink) -> None:
        self._process, self.link = process, link
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._printing = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(cls, config: EngineConfig, factory: str, heartbeat_s: float) -> EngineChild:
        """Start the process; it begins to load at once.

        Raises:
            OSError: the system refuses to start a process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: asyncio.subprocess.Process | None = None
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "server.engine_process",
                    "--fd", str(theirs.fileno()), "--config", config.model_dump_json(),
                    "--factory", factory, "--heartbeat", str(heartbeat_s),
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    # The child must find the modules this process finds, from wherever it was started.
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
                )  # fmt: skip
            _, link = await asyncio.get_running_loop().create_unix_connection(FrameLink, sock=ours)
        except BaseException:
            ours.close()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            raise
        return cls(process, link)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End the process now; listening to its link ends with it."""
        if self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> str:
        """Wait for the end of a process that has closed its socket, and say how it ended, with the tail of its output.

        One that lingers is killed: there must never be two engines at once. So is it where this wait is cancelled,
        which then ends once nothing of the process is left.
        """
        ending = asyncio.create_task(self._end())
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait([ending])
            raise

    async def _end(self) -> str:
        try:
            code = await asyncio.wait_for(self._process.wait(), _LINGER_S)
        except TimeoutError:
            self.kill()
            code = await self._process.wait()
        self.link.close()
        # A grandchild may hold the pipe open; what came until now is enough then.
        await asyncio.wait([self._printing], timeout=1.0)
        self._printing.cancel()
        await asyncio.wait([self._printing])
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return "\n  ".join([how, *self._tail])

    async def close(self, grace_s: float) -> None:
        """Ask the process to end, kill it after ``grace_s`` seconds, and wait for it."""
        self.link.send(Frame.CLOSE)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            _LOG.info("engine process %d did not close within %g s and is killed", self.pid, grace_s)
            self.kill()
        await self.ended()

    async def _read_output(self) -> None:
        assert self._process.stdout is not None  # it was asked for as a pipe
        while line := await _line(self._process.stdout):
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            _LOG.info("%s", text)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or what there is of one that exceeds the reader's limit; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))
