"""The front end's engine: requests in, events out, over a process that is watched and restarted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from server.admin_calls import AdminCalls
from server.engine_admin import FLUSH_CACHE, SWAP_DRAFT
from server.engine_child import EngineChild
from server.engine_process import DEFAULT_FACTORY
from server.engine_protocol import ProgressListener
from server.engine_state import EngineState, StateBoard
from server.frames import Frame, FrameError
from server.request_errors import unpack_error
from server.request_stream import RequestStream
from server.request_table import RequestTable
from server.restart_policy import RestartPolicy
from server.telemetry.observer import Observer
from server.telemetry.request_record import RequestRecord
from server.trace_calls import TraceCalls
from server.wire import pack_request, unpack_event, unpack_info, unpack_load
from specdec.config import Config, EngineConfig, WeightDtype
from specdec.errors import EngineDeadError, SpecdecError
from specdec.types import EngineInfo, EngineLoad, Request, StepTrace

_LOG = logging.getLogger(__name__)
_CLOSE_GRACE_S = 5.0


class EngineStartError(SpecdecError):
    """The engine can not be started, or kept running; the message is the engine's own where it gave one."""


class EngineClient:
    """Owns the engine process. All methods belong to one event loop.

    ``factory`` (module:function) builds the engine inside the process; ``progress`` hears of loading, ``observer`` of
    requests.
    """

    def __init__(
        self,
        config: Config,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: ProgressListener | None = None,
        policy: RestartPolicy | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._config, self._factory, self._progress = config, factory, progress
        self._observer = observer
        self._policy = policy or RestartPolicy()
        self._board = StateBoard()
        self._table = RequestTable(self._abort_ticket)
        self._traces = TraceCalls()
        self._admin = AdminCalls()
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
        return self._board.state

    @property
    def in_flight(self) -> int:
        """Requests not yet ended."""
        return len(self._table)

    @property
    def pid(self) -> int | None:
        """The engine's process id while it runs."""
        return self._child.pid if self._child else None

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
        return self._board.watch()

    async def start(self) -> None:
        """Start the process and its supervisor; returns before it is ready."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            EngineStartError: it will not be.
        """
        states = self._board.watch()
        try:
            while (state := await states.get()) != EngineState.READY:
                if state.is_final:
                    raise EngineStartError(self._failure or "the engine was closed")
        finally:
            self._board.unwatch(states)
        return self.info

    async def wait_failed(self) -> str:
        """Wait until the engine has failed for good or was closed, and return why (empty when closed)."""
        states = self._board.watch()
        try:
            while not (await states.get()).is_final:
                pass
        finally:
            self._board.unwatch(states)
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
        ticket, stream = self._table.open(request)
        if record is None and self._observer is not None:
            record = self._observer.request(request)
        if record is not None:
            stream.record_in(record)
        self._child.link.send(Frame.SUBMIT, (ticket, *pack_request(request)[1:]))
        return stream

    async def trace(self, limit: int) -> list[StepTrace]:
        """The engine's last ``limit`` steps, newest last; waits for the step that runs.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            GenerationFailedError: the engine could not tell.
        """
        if self.state != EngineState.READY or self._child is None:
            raise EngineDeadError(self._why_not())
        number, answer = self._traces.open()
        self._child.link.send(Frame.TRACE, number, limit)
        return await answer

    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no running request uses; returns how many pages that frees.

        Raises:
            EngineDeadError: the engine is not ready, or ends before it answers.
            RequestError: the engine could not do it.
        """
        freed: int = await self._command(int, FLUSH_CACHE)
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

        info: EngineInfo = await self._command(adopt, SWAP_DRAFT, draft, dtype)
        return info

    async def _command(self, read: Callable[[Any], Any], command: str, *args: Any) -> Any:
        if self.state != EngineState.READY or self._child is None:
            raise EngineDeadError(self._why_not())
        number, answer = self._admin.open(read)
        self._child.link.send(Frame.ADMIN, number, command, args)
        return await answer

    def abort(self, request_id: str) -> bool:
        """End a request: its reader gets Finished(ABORTED) per open sample. False when it is not in flight."""
        ticket = self._table.ticket(request_id)
        if ticket is not None:
            self._abort_ticket(ticket)
        return ticket is not None

    def fail_all(self, error: EngineDeadError) -> None:
        """End every request in flight with ``error``; the engine forgets them."""
        for ticket in self._table.tickets():
            self._abort_ticket(ticket)
        self._table.fail_all(error)

    async def close(self) -> None:
        """End the process and every request."""
        # A process that loads does not listen yet, so there is no point in asking it.
        grace_s = _CLOSE_GRACE_S if self.state == EngineState.READY else 0.0
        self._board.become(EngineState.CLOSED)
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

    def _abort_ticket(self, ticket: str) -> None:
        if self._child is not None:
            self._child.link.send(Frame.ABORT, ticket)

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
        self._child = await EngineChild.spawn(self._engine_config, self._factory, self._heartbeat_s)
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
        if self.state == EngineState.CLOSED:
            return None
        if self._info is not None:
            self._board.become(EngineState.RESTARTING)
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
        self._board.become(EngineState.FAILED)
        self._end_calls(EngineDeadError(self._why_not()))

    def _end_calls(self, error: EngineDeadError) -> None:
        self._table.fail_all(error)
        self._traces.fail_all(error)
        self._admin.fail_all(error)

    def _take(self, frame: list[Any]) -> None:
        kind, *rest = frame
        match kind:
            case Frame.EVENTS:
                for parts in rest[0]:
                    self._table.deliver(unpack_event(parts))
            case Frame.ALIVE:
                self._load = unpack_load(rest[0])
            case Frame.REFUSED:
                self._table.refuse(rest[0], unpack_error(rest[1]))
            case Frame.TRACE:
                self._traces.answer(*rest)
            case Frame.ADMIN:
                self._admin.answer(*rest)
            case Frame.PROGRESS:
                if self._progress is not None:
                    self._progress(*rest)
            case Frame.READY:
                self._info, self._ready_at = unpack_info(rest[0]), time.monotonic()
                self._board.become(EngineState.READY)
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
