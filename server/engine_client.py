"""The front end's engine: requests in, events out, over a process that is watched and restarted."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from server.engine_calls import EngineCalls, RequestStream, RequestTable
from server.engine_process import DEFAULT_FACTORY, FLUSH_CACHE, SWAP_DRAFT
from server.errors import unpack_error
from server.interfaces import CacheFeed, ProgressListener
from server.ipc import Frame, FrameError, FrameLink, pack_request, unpack_event, unpack_info, unpack_load, unpack_trace
from server.observe.observer import Observer
from server.observe.records import RequestRecord
from specdec.child_python import module_command, module_environment
from specdec.config import Config, EngineConfig, KvEventsConfig, WeightDtype
from specdec.core.types import EngineInfo, EngineLoad, Request, StepTrace
from specdec.errors import EngineDeadError, SpecdecError

_LOG = logging.getLogger(__name__)


class EngineState(StrEnum):
    """``FAILED``: it will not come back by itself. ``CLOSED``: it was told to end."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def is_final(self) -> bool:
        """Whether no other state follows."""
        return self in (EngineState.FAILED, EngineState.CLOSED)


class StateFeed:
    """The state in force, and a queue of what it becomes for each who watches."""

    def __init__(self) -> None:
        self._state = EngineState.LOADING
        self._watchers: list[asyncio.Queue[EngineState]] = []

    @property
    def state(self) -> EngineState:
        """The state in force."""
        return self._state

    def become(self, state: EngineState) -> None:
        """Change the state; a final one stays."""
        if state == self._state or self._state.is_final:
            return
        self._state = state
        for watcher in self._watchers:
            watcher.put_nowait(state)

    def watch(self) -> asyncio.Queue[EngineState]:
        """A queue that holds the state in force and then gets every further one."""
        watcher: asyncio.Queue[EngineState] = asyncio.Queue()
        watcher.put_nowait(self._state)
        self._watchers.append(watcher)
        return watcher

    def unwatch(self, watcher: asyncio.Queue[EngineState]) -> None:
        """Stop filling ``watcher``."""
        self._watchers.remove(watcher)


class RestartPolicy:
    """Waits longer after each quick death in a row, and gives up after ``give_up_after`` of them.

    A death is quick when the engine had been ready for less than ``quick_s`` seconds, or never. The first wait is
    ``first_s``, each further one twice the last, at most ``longest_s``.
    """

    def __init__(
        self, *, first_s: float = 0.5, longest_s: float = 30.0, quick_s: float = 60.0, give_up_after: int = 5
    ) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._quick_s, self._give_up_after = quick_s, give_up_after
        self._quick_deaths = 0

    @property
    def quick_deaths(self) -> int:
        """Quick deaths in a row until now."""
        return self._quick_deaths

    def after_death(self, ready_for_s: float) -> float | None:
        """Seconds to wait before the next start, after an engine that had been ready for so long; None: give up."""
        self._quick_deaths = self._quick_deaths + 1 if ready_for_s < self._quick_s else 0
        if self._quick_deaths >= self._give_up_after:
            return None
        return float(min(self._longest_s, self._first_s * 2 ** max(0, self._quick_deaths - 1)))


_PROCESS_LOG = logging.getLogger("specdec.engine_process")
_TAIL_LINES = 60
_LINGER_S = 2.0


class EngineChild:
    """The process, its socket (``link``), and the tail of what it printed. Make one with `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, link: FrameLink) -> None:
        self._process, self.link = process, link
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._printing = asyncio.create_task(self._read_output())

    @classmethod
    async def spawn(
        cls, config: EngineConfig, factory: str, heartbeat_s: float, kv_events: KvEventsConfig | None = None
    ) -> EngineChild:
        """Start the process; it begins to load at once.

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
                    "--fd", str(theirs.fileno()), "--config", config.model_dump_json(),
                    "--factory", factory, "--heartbeat", str(heartbeat_s), *more,
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=module_environment(),
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
            _PROCESS_LOG.info("engine process %d did not close within %g s and is killed", self.pid, grace_s)
            self.kill()
        await self.ended()

    async def _read_output(self) -> None:
        assert self._process.stdout is not None  # it was asked for as a pipe
        while line := await _line(self._process.stdout):
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.append(text)
            _log_again(text)


_LOGGED = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ([\w.]+): (.*)")


def _log_again(line: str) -> None:
    """Log what the process logged under the name and level it had there, and whatever else it printed as its own."""
    found = _LOGGED.fullmatch(line)
    if found is None:
        _PROCESS_LOG.info("%s", line)
    else:
        level, name, message = found.groups()
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or what there is of one that exceeds the reader's limit; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(max(error.consumed, 1))


_CLOSE_GRACE_S = 5.0


class EngineStartError(SpecdecError):
    """The engine can not be started, or kept running; the message is the engine's own where it gave one."""


class EngineClient:
    """Owns the engine process. All methods belong to one event loop.

    ``factory`` (module:function) builds the engine inside the process; ``progress`` hears of loading, ``observer`` of
    requests. ``spare``: bytes of memory that a process which starts now must leave to others. ``cache_feed``: told what
    the prefix cache holds.
    """

    def __init__(
        self,
        config: Config,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: ProgressListener | None = None,
        policy: RestartPolicy | None = None,
        observer: Observer | None = None,
        spare: Callable[[], int] | None = None,
        cache_feed: CacheFeed | None = None,
    ) -> None:
        self._config, self._factory, self._progress, self._spare = config, factory, progress, spare
        self._observer, self.cache_feed = observer, cache_feed
        self._policy = policy or RestartPolicy()
        self._states = StateFeed()
        self._table = RequestTable(self._abort_by_engine_id)
        self._calls = EngineCalls()
        self._engine_config = config.engine
        self._child: EngineChild | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._load = EngineLoad()
        self._failure = ""
        self._last_words: tuple[bool, str] | None = None
        self._ready_at: float | None = None
        self.restarts = 0

    @property
    def state(self) -> EngineState:
        """The process's state."""
        return self._states.state

    @property
    def in_flight(self) -> int:
        """Requests not yet ended."""
        return len(self._table)

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs."""
        return self._child.pid if self._child else None

    @property
    def is_known(self) -> bool:
        """Whether the engine has ever been ready."""
        return self._info is not None

    @property
    def info(self) -> EngineInfo:
        """What the engine is; that of the last ready one while it restarts.

        Raises:
            EngineDeadError: it has not been ready yet.
        """
        if self._info is None:
            raise EngineDeadError(self._why_not())
        return self._info

    @property
    def load(self) -> EngineLoad:
        """How busy the engine said it is in its last heartbeat; zeros while there is none."""
        return self._load

    @property
    def draft_setting(self) -> tuple[str | None, WeightDtype | None]:
        """The draft model in use and its type, as `swap_draft` takes them."""
        return self._engine_config.draft, self._engine_config.draft_dtype

    def watch(self) -> asyncio.Queue[EngineState]:
        """A queue that holds the state in force and then gets every further one."""
        return self._states.watch()

    async def start(self) -> None:
        """Start the process and its supervisor; returns before it is ready."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            EngineStartError: it will not be.
        """
        states = self._states.watch()
        try:
            while (state := await states.get()) != EngineState.READY:
                if state.is_final:
                    raise EngineStartError(self._failure or "the engine was closed")
        finally:
            self._states.unwatch(states)
        return self.info

    async def wait_failed(self) -> str:
        """Wait until the engine has failed for good or was closed, and return why (empty when closed)."""
        states = self._states.watch()
        try:
            while not (await states.get()).is_final:
                pass
        finally:
            self._states.unwatch(states)
        return self._failure

    def generate(self, request: Request, record: RequestRecord | None = None) -> RequestStream:
        """Submit ``request`` at once and return its events; leave the stream's ``async with`` to abort it.

        record: told of everything, in place of the observer's own.

        Raises:
            EngineDeadError: the engine is not ready.
            DuplicateRequestError: the id is in flight.
        """
        if self.state != EngineState.READY or self._child is None:
            raise EngineDeadError(self._why_not())
        engine_id, stream = self._table.open(request)
        if record is None and self._observer is not None:
            record = self._observer.request(request)
        if record is not None:
            stream.record_in(record)
        self._child.link.send(Frame.SUBMIT, (engine_id, *pack_request(request)[1:]))
        return stream

    async def trace(self, limit: int) -> list[StepTrace]:
        """The engine's last ``limit`` steps, newest last; waits for the step that runs.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            GenerationFailedError: the engine could not tell.
        """
        steps: list[StepTrace] = await self._call(lambda parts: [unpack_trace(p) for p in parts], Frame.TRACE, limit)
        return steps

    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no running request uses; returns how many pages that frees.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            RequestError: the engine could not do it.
        """
        freed: int = await self._call(int, Frame.ADMIN, FLUSH_CACHE, ())
        return freed

    async def swap_draft(self, draft: str | None, dtype: WeightDtype | None = None) -> EngineInfo:
        """Draft with another model from now on, or with none; also after a restart of the engine. Cancelling the call
        does not end the swap.

        draft, dtype: as in the configuration.

        Raises:
            DraftNotSwappedError: it can not be had, or does not fit; the old one is still in place.
            SwapUnderWayError: another one is being loaded.
            EngineDeadError: the engine is not ready, or ends before it answers.
        """

        def adopt(parts: list[Any]) -> EngineInfo:
            self._info = unpack_info(parts)
            self._engine_config = _with_draft(self._engine_config, draft, dtype)
            return self._info

        info: EngineInfo = await self._call(adopt, Frame.ADMIN, SWAP_DRAFT, (draft, dtype))
        return info

    async def _call(self, read: Callable[[Any], Any], kind: Frame, *parts: Any) -> Any:
        if self.state != EngineState.READY or self._child is None:
            raise EngineDeadError(self._why_not())
        number, answer = self._calls.open(read)
        self._child.link.send(kind, number, *parts)
        return await answer

    def abort(self, request_id: str) -> bool:
        """End a request: its reader gets Finished(ABORTED) per open sample. False when it is not in flight."""
        engine_id = self._table.engine_id(request_id)
        if engine_id is not None:
            self._abort_by_engine_id(engine_id)
        return engine_id is not None

    def fail_all(self, error: EngineDeadError) -> None:
        """End every request in flight with ``error``; the engine forgets them."""
        for engine_id in self._table.engine_ids():
            self._abort_by_engine_id(engine_id)
        self._table.fail_all(error)

    async def close(self, *, at_once: bool = False) -> None:
        """End the process and every request. at_once: without letting it finish its step."""
        # A process that loads does not listen yet, so there is no point in asking it.
        grace_s = _CLOSE_GRACE_S if self.state == EngineState.READY and not at_once else 0.0
        self._states.become(EngineState.CLOSED)
        self._end_calls(EngineDeadError("the server stopped"))
        if self._child is not None:
            await self._child.close(grace_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])

    def _why_not(self) -> str:
        if self.state == EngineState.FAILED:
            return f"the engine failed: {self._failure}"
        return f"the engine is {self.state}; retry shortly"

    def _abort_by_engine_id(self, engine_id: str) -> None:
        if self._child is not None:
            self._child.link.send(Frame.ABORT, engine_id)

    async def _supervise(self) -> None:
        """Start the process, again whenever it dies, until the policy gives up."""
        try:
            while (delay := await self._one_life()) is not None:
                await asyncio.sleep(delay)
                self.restarts += 1
        except Exception as error:  # a fault of ours must show, not hang every request
            _LOG.exception("the engine's supervisor broke")
            self._give_up(f"the engine's supervisor broke: {error}")

    async def _one_life(self) -> float | None:
        """One run of the process. Seconds to wait before the next; None: there is none."""
        self._last_words, self._ready_at, self._load = None, None, EngineLoad()
        config = self._engine_config
        if self._spare is not None:
            config = config.model_copy(update={"spare_bytes": config.spare_bytes + self._spare()})
        kv_events = None if self.cache_feed is None else self._config.server.kv_events
        self._child = await EngineChild.spawn(config, self._factory, self._heartbeat_s, kv_events)
        child, watchdog = self._child, asyncio.create_task(self._watch_heartbeat(self._child))
        try:
            await child.link.listen(self._take)
        except (FrameError, ValueError, TypeError) as error:
            _LOG.exception("the engine process %d sent nonsense", child.pid)
            self._last_words = (False, f"it sent nonsense: {error}")
            child.kill()
        except BaseException:
            child.kill()
            await child.ended()  # or its pipe and who reads it would outlive the loop
            raise
        finally:
            watchdog.cancel()
            self._child = None
            if self._ready_at is not None and self.cache_feed is not None:
                self.cache_feed.cleared()
        if self.state == EngineState.CLOSED:
            return None
        if self._info is not None:
            self._states.become(EngineState.RESTARTING)
        self._end_calls(EngineDeadError())
        return self._after_death(child.pid, await child.ended())

    def _after_death(self, pid: int, how: str) -> float | None:
        refused, message = self._last_words or (False, "")
        ready_for = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
        if refused and self._info is None:
            self._give_up(message)
            return None
        _LOG.error("engine process %d died: %s; %s", pid, message or "no last words", how)
        delay = self._policy.after_death(ready_for)
        if delay is None:
            cause = message or how.splitlines()[0]
            self._give_up(f"the engine died {self._policy.quick_deaths} times in a row, last: {cause}")
            return None
        _LOG.warning("the engine is restarted in %.1f s", delay)
        return delay

    def _give_up(self, why: str) -> None:
        self._failure = why
        self._states.become(EngineState.FAILED)
        self._end_calls(EngineDeadError(self._why_not()))

    def _end_calls(self, error: EngineDeadError) -> None:
        self._table.fail_all(error)
        self._calls.fail_all(error)

    def _take(self, frame: list[Any]) -> None:
        kind, *rest = frame
        match kind:
            case Frame.EVENTS:
                for parts in rest[0]:
                    self._table.deliver(unpack_event(parts))
            case Frame.KV_EVENTS:
                if self.cache_feed is not None:
                    self.cache_feed.publish(rest[0])
            case Frame.ALIVE:
                self._load = unpack_load(rest[0])
            case Frame.REFUSED:
                self._table.refuse(rest[0], unpack_error(rest[1]))
            case Frame.TRACE | Frame.ADMIN:
                self._calls.answer(*rest)
            case Frame.PROGRESS:
                if self._progress is not None:
                    self._progress(*rest)
            case Frame.READY:
                self._info, self._ready_at = unpack_info(rest[0]), time.monotonic()
                if self.cache_feed is not None:
                    self.cache_feed.cleared()
                self._states.become(EngineState.READY)
            case Frame.DIED:
                self._last_words = (rest[0], rest[1])
            case _:
                raise ValueError(f"unknown frame {kind!r}")

    @property
    def _heartbeat_s(self) -> float:
        return min(1.0, self._config.server.heartbeat_timeout_s / 4)

    async def _watch_heartbeat(self, child: EngineChild) -> None:
        """Kill a ready engine that has been silent for the configured time: it hangs."""
        limit = self._config.server.heartbeat_timeout_s
        tick = limit / 8
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - slept_at > 2 * tick:
                # We were stopped or starved ourselves; frames may lie unread, so silence proves nothing.
                child.link.last_frame_s = now
            if self._ready_at is not None and now - child.link.last_frame_s > limit:
                silent_s = now - child.link.last_frame_s
                _LOG.error("engine process %d was silent for %.1f s and is killed", child.pid, silent_s)
                self._last_words = (False, f"it was silent for more than {limit:g} s")
                child.kill()
                return


def _with_draft(config: EngineConfig, draft: str | None, dtype: WeightDtype | None) -> EngineConfig:
    """``config`` of an engine that drafts with another model, or with none."""
    drafters = tuple(name for name in config.drafters if name != "model") + (("model",) if draft is not None else ())
    speculation = config.speculation.model_copy(update={"drafters": drafters})
    return config.model_copy(update={"draft": draft, "draft_dtype": dtype, "speculation": speculation})
