"""The engine process as the front end runs it: started, watched, restarted, closed."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from server.engine_process import DEFAULT_FACTORY, LINE_BREAK
from server.ipc import Frame, FrameLink, unpack
from specdec.child_python import module_command, module_environment
from specdec.config import Config, EngineConfig, KvEventsConfig
from specdec.core.types import EngineInfo, EngineLoad
from specdec.errors import LONGEST_HINT_S, UNAVAILABLE_RETRY_S, EngineDeadError, SpecdecError
from specdec.models.progress import Progress

if TYPE_CHECKING:
    from server.kv_events import KvEventPublisher

_LOG = logging.getLogger(__name__)


class EngineState(StrEnum):
    """``FAILED``: it is not restarted. ``CLOSED``: the server ended it."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def is_final(self) -> bool:
        """Whether the state never changes again."""
        return self in (EngineState.FAILED, EngineState.CLOSED)


PLAIN_PATIENCE = 20  # factor on `RestartPolicy.silent_s` with plain kernels, whose step of a prompt may take minutes


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """When the engine is restarted: after a death, or after a silence."""

    first_s: float = 0.5  # seconds of the first wait; it doubles with each quick death
    longest_s: float = 30.0
    quick_s: float = 60.0  # a death is quick if the engine had been ready for less, or never
    give_up_after: int = 5  # quick deaths in a row
    silent_s: float = 30.0  # without a frame
    quick_deaths: int = field(default=0, init=False)  # in a row
    _failed_spawns: int = field(default=0, init=False)

    def after_death(self, ready_for_s: float) -> float | None:
        """Seconds until the next start, after an engine that was ready for ``ready_for_s`` seconds; None: give up."""
        self._failed_spawns = 0
        self.quick_deaths = self.quick_deaths + 1 if ready_for_s < self.quick_s else 0
        if self.quick_deaths >= self.give_up_after:
            return None
        return self._backoff_s(self.quick_deaths)

    def after_failed_spawn(self, error: OSError) -> float | None:
        """Seconds to wait after a process could not be started; None: give up, as after quick deaths. A lack of
        descriptors, processes or memory passes, so it is retried without end."""
        if error.errno not in _PASSING_ERRORS:
            return self.after_death(0.0)
        self._failed_spawns += 1
        return self._backoff_s(self._failed_spawns)

    def _backoff_s(self, count: int) -> float:
        return float(min(self.longest_s, self.first_s * 2 ** min(max(0, count - 1), 30)))


_PASSING_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


_PROCESS_LOG = logging.getLogger("specdec.engine_process")
_TAIL_LINES = 60  # of output, logged after a death
_LINGER_S = 2.0  # from the end of the socket to the kill of its process


class EngineChild:
    """The process, its socket (``link``), and the tail of its output. Created by `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, link: FrameLink) -> None:
        self._process, self.link = process, link
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._printing = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(
        cls,
        config: EngineConfig,
        factory: str,
        heartbeat_s: float,
        take: Callable[[list[Any]], None],
        kv_events: KvEventsConfig | None = None,
    ) -> EngineChild:
        """Start the process; it begins to load at once. take: called with every frame that it sends.

        Raises:
            OSError: the system refuses to start a process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process: asyncio.subprocess.Process | None = None
        more = [] if kv_events is None else ["--kv-events", kv_events.model_dump_json()]
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *module_command("server.engine_process"),
                    "--fd", str(theirs.fileno()), "--config", config.model_dump_json(exclude_unset=True),
                    "--factory", factory, "--heartbeat", str(heartbeat_s), *more,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=module_environment(),
                    start_new_session=True,  # a terminal's Ctrl-C would end it with a traceback while it imports
                )  # fmt: skip
            _, link = await asyncio.get_running_loop().create_unix_connection(partial(FrameLink, take), sock=ours)
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
        """Kill the process; its link then closes."""
        if self._process.returncode is None:
            self._process.kill()

    async def ended(self, within_s: float = _LINGER_S) -> str:
        """Wait until a process that was asked to end, or closed its socket, has ended; returns how, and the tail of its
        output.

        It is killed after ``within_s`` seconds, because two engines must never run at once. Cancelling the call kills
        it too, and waits until it is gone.
        """
        ending = asyncio.create_task(self._end(within_s))
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            self.kill()
            await asyncio.wait([ending])
            raise

    async def _end(self, within_s: float) -> str:
        try:
            code = await asyncio.wait_for(self._process.wait(), within_s)
        except TimeoutError:
            _PROCESS_LOG.info("engine process %d did not end within %g s and is killed", self.pid, within_s)
            self.kill()
            code = await self._process.wait()
        self.link.close()
        # A grandchild may hold the pipe open; the output so far is enough then.
        await asyncio.wait([self._printing], timeout=1.0)
        self._printing.cancel()
        await asyncio.wait([self._printing])
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return "\n".join([how, *self._tail]).replace("\n", "\n  ")

    async def close(self, grace_s: float) -> None:
        """Ask the process to end, kill it after ``grace_s`` seconds, and wait until it is gone."""
        self.link.send(Frame.CLOSE)
        await self.ended(grace_s)

    async def _read_output(self) -> None:
        assert self._process.stdout is not None  # it is a pipe
        while line := await _line(self._process.stdout):
            text = line.decode("utf-8", "replace").rstrip().replace(LINE_BREAK, "\n")
            self._tail.append(text)
            _log_again(text)


_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)", re.DOTALL)


def _log_again(line: str) -> None:
    """Log a line of the process's log under its name and level, and any other output as INFO."""
    found = _LOGGED.fullmatch(line)
    if found is None:
        _PROCESS_LOG.info("%s", line)
    else:
        level, name, message = found.groups()
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or the part of a line that exceeds the reader's limit; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


_CLOSE_GRACE_S = 5.0


class EngineStartError(SpecdecError):
    """The engine cannot be started or kept running; the message is the engine's own if it sent one."""


class EngineListener(Protocol):
    """Receives what the engine process sends about calls."""

    def on_frame(self, frame: list[Any]) -> None:
        """Take a frame that concerns calls. Raises an exception of any type for a malformed one."""

    def on_lost(self, error: EngineDeadError, *, died: bool = False) -> None:
        """End every call with ``error``: no answer will come. died: the process ended by itself."""


class EngineSupervisor:
    """Runs the engine process, restarts it after a death, and keeps its last figures. Belongs to one event loop.

    Set ``listener`` before `start`.
    """

    listener: EngineListener

    def __init__(
        self,
        config: Config,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: Progress | None = None,
        policy: RestartPolicy | None = None,
        spare: Callable[[], int] | None = None,
        cache_feed: KvEventPublisher | None = None,
    ) -> None:
        """factory: ``module:function`` that builds the engine inside the process. spare: bytes of memory that a process
        started now must leave to others. cache_feed: receives the events of the prefix cache."""
        self.config = self._configured = config.engine  # of the next start, and as the server got it
        self.cache_feed, self.restarts = cache_feed, 0
        self._server, self._factory, self._progress, self._spare = config.server, factory, progress, spare
        self._policy = policy or RestartPolicy()
        self.state = EngineState.LOADING
        self.change = asyncio.Event()  # of the state: set by the next one
        self._child: EngineChild | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self.load = EngineLoad()  # in the engine's last heartbeat; zeros before the first one
        self._failure = ""
        self._last_words: tuple[bool, str] | None = None  # whether it refused to start, and the message
        self._ready_at: float | None = None  # monotonic seconds
        self._start_at = 0.0  # of this start or the next one, in monotonic seconds
        self._start_s = 0.0  # from the last start to READY

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return self._child.pid if self._child else None

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent."""
        return self.state == EngineState.READY

    @property
    def is_known(self) -> bool:
        """Whether the engine has ever been ready."""
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        """The engine's description; that of the last ready one while it restarts.

        Raises:
            EngineDeadError: it has not been ready yet.
        """
        if self._info is None:
            raise self.unavailable()
        return self._info

    @property
    def promised_bytes(self) -> int:
        """Bytes that the running engine will need and has not allocated yet: its KV cache fills as it is used."""
        if self.pid is None or self._info is None:
            return 0
        try:
            taken = psutil.Process(self.pid).memory_info()
        except psutil.Error:
            return 0  # it has ended, and its memory is free
        # Mapped file pages count as free memory, so they are not subtracted.
        return max(0, self._info.memory_bytes - (taken.rss - taken.shared))

    def adopt(self, info: EngineInfo, config: EngineConfig) -> None:
        """Record that the running engine was changed; restarts use ``config`` too, until one refuses its draft."""
        self._info, self.config = info, config

    def send(self, *parts: Any) -> None:
        """Send a frame to the process, if there is one."""
        if self._child is not None:
            self._child.link.send(*parts)

    def check_ready(self) -> None:
        """Raises:
        EngineDeadError: the engine is not ready.
        """
        if not self.is_ready:
            raise self.unavailable()

    async def start(self) -> None:
        """Start the process and its supervision; returns before it is ready."""
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            EngineStartError: it will not be.
        """
        if await self._wait_for(EngineState.READY) != EngineState.READY:
            raise EngineStartError(self._failure or "the engine was closed")
        return self.info

    async def wait_failed(self) -> str:
        """Wait until the engine has failed for good or was closed, and return why (empty when closed)."""
        await self._wait_for()
        return self._failure

    async def _wait_for(self, *states: EngineState) -> EngineState:
        """Wait until the state is one of ``states`` or final, and return it."""
        while self.state not in states and not self.state.is_final:
            await self.change.wait()
        return self.state

    def _become(self, state: EngineState) -> None:
        """Change the state, unless it is final."""
        if state == self.state or self.state.is_final:
            return
        self.state = state
        change, self.change = self.change, asyncio.Event()
        change.set()

    async def close(self, *, at_once: bool = False) -> None:
        """End the process and every call. at_once: without letting it finish its step."""
        # A loading process does not read commands yet, so asking it to close is pointless.
        grace_s = _CLOSE_GRACE_S if self.is_ready and not at_once else 0.0
        self._become(EngineState.CLOSED)
        self.listener.on_lost(EngineDeadError("the server stopped"))
        if self._child is not None:
            await self._child.close(grace_s)
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.wait([self._supervision])

    def unavailable(self) -> EngineDeadError:
        """The error of a call that comes while the engine is not ready."""
        if self.state == EngineState.FAILED:
            return EngineDeadError(f"the engine failed: {self._failure}; restart the server", None)
        return EngineDeadError(f"the engine is {self.state}; retry shortly", self._retry_s)

    @property
    def _retry_s(self) -> float:
        """Seconds until the engine is ready if it starts as fast as last time, within what a client waits."""
        left = self._start_at + self._start_s - time.monotonic()
        return min(max(left, UNAVAILABLE_RETRY_S), LONGEST_HINT_S)

    async def _supervise(self) -> None:
        """Start the process, again whenever it dies, until the policy gives up."""
        try:
            while (delay := await self._one_life()) is not None:
                self._start_at = time.monotonic() + delay
                await asyncio.sleep(delay)
                self.restarts += 1
        except Exception as error:  # a bug here must show, not leave every request waiting
            _LOG.exception("the engine's supervisor broke")
            self._give_up(f"the engine's supervisor broke: {error}")

    async def _one_life(self) -> float | None:
        """One run of the process. Returns seconds to wait before the next one; None: there is none."""
        self._last_words, self._ready_at, self.load = None, None, EngineLoad()
        self._start_at = time.monotonic()
        config = self.config
        if self._spare is not None:
            config = config.model_copy(update={"spare_bytes": config.spare_bytes + self._spare()})
        kv_events = None if self.cache_feed is None else self._server.kv_events
        heartbeat_s = min(1.0, self._policy.silent_s / 4)
        try:
            self._child = await EngineChild.spawn(config, self._factory, heartbeat_s, self._take, kv_events)
        except OSError as error:
            _LOG.error("the engine process could not be started: %s", error)
            delay = self._policy.after_failed_spawn(error)
            return self._next_start(delay, f"the engine process cannot be started: {error}")
        child, watchdog = self._child, asyncio.create_task(self._watch_heartbeat(self._child))
        try:
            await child.link.closed()
        except Exception as error:  # of any type: it is the bytes that are wrong
            _LOG.exception("the engine process %d sent a malformed frame", child.pid)
            self._last_words = (False, f"it sent a malformed frame: {error}")
            child.kill()
        except BaseException:
            child.kill()
            await child.ended()  # its pipe and the task that reads it must not outlive the loop
            raise
        finally:
            watchdog.cancel()
            self._child = None
            if self._ready_at is not None and self.cache_feed is not None:
                self.cache_feed.cleared()
        if self.state == EngineState.CLOSED:
            return None
        if self._info is not None:
            self._become(EngineState.RESTARTING)
        ready_for = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
        delay = self._policy.after_death(ready_for)
        self._start_at = time.monotonic() + (delay or 0.0)
        self.listener.on_lost(EngineDeadError(retry_after_s=None if delay is None else self._retry_s), died=True)
        return self._after_death(child.pid, await child.ended(), delay)

    def _after_death(self, pid: int, how: str, delay: float | None) -> float | None:
        refused, message = self._last_words or (False, "")
        if refused and self._info is None:
            self._give_up(message)
            return None
        if not message and how.startswith("killed by signal 9"):
            how = how.replace("signal 9", "signal 9, perhaps by the kernel for lack of memory", 1)
        _LOG.error("engine process %d of %s died: %s; %s", pid, self.config.target, message or "no error message", how)
        if refused and _drafts_of(self.config) != _drafts_of(self._configured):
            _LOG.error("the next start has the configured draft again, not the one that was swapped in")
            self.config = self._configured
        cause = message or how.splitlines()[0]
        return self._next_start(delay, f"the engine died {self._policy.quick_deaths} times in a row, last: {cause}")

    def _next_start(self, delay: float | None, failure: str) -> float | None:
        """``delay``, the seconds until the next start; None: there is none, because of ``failure``."""
        if delay is None:
            self._give_up(failure)
            _LOG.error("%s; it is not started any more", failure)  # a server of other models goes on
        else:
            _LOG.warning("the engine is started again in %.1f s", delay)
        return delay

    def _give_up(self, why: str) -> None:
        self._failure = why
        self._become(EngineState.FAILED)
        self.listener.on_lost(self.unavailable())

    def _take(self, frame: list[Any]) -> None:
        kind, *rest = frame
        match kind:
            case Frame.ALIVE:
                self.load = unpack(EngineLoad, rest[0])
            case Frame.KV_EVENTS:
                if self.cache_feed is not None:
                    self.cache_feed.publish(rest[0])
            case Frame.PROGRESS:
                if self._progress is not None:
                    self._progress(*rest)
            case Frame.READY:
                self._info, self._ready_at = unpack(EngineInfo, rest[0]), time.monotonic()
                self._start_s = self._ready_at - self._start_at
                if self.cache_feed is not None:
                    self.cache_feed.cleared()
                self._become(EngineState.READY)
            case Frame.DIED:
                self._last_words = (rest[0], rest[1])
            case _:
                self.listener.on_frame(frame)

    @property
    def patience_s(self) -> float:
        """Seconds that a ready engine may be silent: `RestartPolicy.silent_s`, or more if a step of prompts is slow."""
        plain = self._info is not None and self._info.kernels == "reference"
        slowest_s = max(self.load.prompt_ms, default=0.0) / 1e3
        return max(self._policy.silent_s * (PLAIN_PATIENCE if plain else 1), 2 * slowest_s)

    async def _watch_heartbeat(self, child: EngineChild) -> None:
        """Kill a ready engine that has been silent for longer than `patience_s`: it hangs."""
        tick = self._policy.silent_s / 8
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - slept_at > 2 * tick:
                # This process was stopped or starved itself; frames may lie unread, so silence proves nothing.
                child.link.last_frame_s = now
            silent_s, limit = now - child.link.last_frame_s, self.patience_s
            if self._ready_at is not None and silent_s > limit:
                _LOG.error("engine process %d was silent for %.1f s and is killed", child.pid, silent_s)
                self._last_words = (False, f"it was silent for more than {limit:g} s")
                child.kill()
                return


def _drafts_of(config: EngineConfig) -> tuple[str | None, ...]:
    """What a swap changes; the order of the drafters may differ after one that restored the configured draft."""
    return config.draft, config.draft_dtype, config.draft_head, *sorted(config.drafters)
