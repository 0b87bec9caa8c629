"""The engine's own process: ``python -m server.engine_process --fd N --config JSON``, started by `EngineChild`.

Exit codes: 0 on close, or if the front end is gone; 1 after a fault of the engine; 2 if it refused to start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from server.errors import DraftNotSwappedError, GenerationFailedError, SwapUnderWayError, pack_error
from server.ipc import Frame, ParentGoneError, ParentLink, pack_event, unpack
from server.kv_event_messages import pack_batch
from specdec.child_python import die_with_parent
from specdec.config import EngineConfig, KvEventsConfig
from specdec.core.cache_events import CacheRecorder
from specdec.core.types import Failed, Request
from specdec.errors import RequestError, SpecdecError
from specdec.models.progress import Progress

if TYPE_CHECKING:
    from specdec.engine.engine import Engine  # with torch, which a stand-in does without

_LOG = logging.getLogger(__name__)


FLUSH_CACHE, SWAP_DRAFT, TRACE = "flush_cache", "swap_draft", "trace"


class EngineAdmin:
    """Runs operators' commands between steps and answers each. A command that fails affects no request."""

    def __init__(self, engine: Engine, link: ParentLink) -> None:
        self._engine, self._link = engine, link
        self._loader = ThreadPoolExecutor(1, "draft-load")
        self._loading: tuple[int, Future[Any]] | None = None  # number and draft model of a swap

    @property
    def busy(self) -> bool:
        """Whether a command is under way."""
        return self._loading is not None

    def take(self, number: int, command: str, args: list[Any]) -> None:
        """Run or start ``command``; its answer carries ``number``."""
        self._answer(number, lambda: self._begin(number, command, args))

    def poll(self) -> None:
        """Swap the draft model if it has loaded; called between steps."""
        if self._loading is not None and self._loading[1].done():
            (number, loaded), self._loading = self._loading, None
            self._answer(number, lambda: self._engine.swap_draft(loaded.result()))

    def _begin(self, number: int, command: str, args: list[Any]) -> Any:
        engine = self._engine
        if command == FLUSH_CACHE:
            return engine.flush_cache()
        if command == TRACE:
            return engine.trace(*args)
        if command != SWAP_DRAFT:
            raise ValueError(f"unknown command {command!r}")
        if self._loading is not None:
            raise SwapUnderWayError
        draft, dtype = args
        if draft is None:
            return engine.swap_draft(None)
        self._loading = number, self._loader.submit(engine.load_draft, draft, dtype)
        return None

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Send the result of ``work`` or its error. None: the command continues, and is answered later."""
        result = error = None
        try:
            result = work()
        except RequestError as refusal:
            error = pack_error(refusal)
        except SpecdecError as refusal:
            error = pack_error(DraftNotSwappedError(f"{refusal}; the draft model is unchanged"))
        except Exception:
            _LOG.exception("an operator's command failed")
            error = pack_error(GenerationFailedError("INTERNAL", "the command failed; see the engine's log"))
        if result is not None or error is not None:
            self._link.send(Frame.ADMIN, number, error, result)


_LOADING_POLL_S = 0.02  # between looks of an idle engine whether a command under way has ended


class EngineLoop:
    """Steps one engine for one front end.

    heartbeat_s: seconds between reports of the load. kv_events: sends the prefix cache's changes after a step's tokens.
    """

    def __init__(self, engine: Engine, link: ParentLink, heartbeat_s: float, kv_events: KvEventsConfig | None) -> None:
        self._engine, self._link, self._kv_events = engine, link, kv_events
        if kv_events is not None:
            self._cache = CacheRecorder(salted=kv_events.salted)
            engine.follow_cache(self._cache)
        self._heartbeat_s = heartbeat_s
        self._reported_at = time.monotonic()
        self._admin = EngineAdmin(engine, link)

    def run(self) -> None:
        """Serve until the front end sends CLOSE.

        Raises:
            ParentGoneError: the front end is gone.
            Exception: the error of the engine's step; the engine must not be used again.
        """
        while self._take_commands():
            if self._engine.has_work():
                events = self._engine.step()
                if events:
                    self._link.send(Frame.EVENTS, [pack_event(event) for event in events])
            self._admin.poll()
            if self._kv_events is not None and (changes := self._cache.take()):
                self._link.send(Frame.KV_EVENTS, pack_batch(changes, self._kv_events.format))
            self._report_load()

    def _take_commands(self) -> bool:
        """Run the commands that have arrived; waits for one only if there is no work. Returns False on CLOSE."""
        wait = 0.0
        if not self._engine.has_work():
            wait = max(0.0, self._reported_at + self._heartbeat_s - time.monotonic())
            if self._admin.busy:
                wait = min(wait, _LOADING_POLL_S)
        for kind, *rest in self._link.receive(wait):
            if kind == Frame.SUBMIT:
                self._submit(*rest)
            elif kind == Frame.ABORT:
                self._engine.abort(*rest)
            elif kind == Frame.ADMIN:
                self._admin.take(*rest)
            elif kind == Frame.CLOSE:
                return False
            else:
                raise ValueError(f"unknown command {kind!r}")
        return True

    def _submit(self, parts: list[Any], waited_s: float) -> None:
        request = unpack(Request, parts)
        try:
            self._engine.submit(request, waited_s)
            return
        except RequestError as refusal:
            error = refusal
        except Exception:
            # One request's fault must not end the others; a broken engine fails in `step`.
            _LOG.exception("submit of request %s raised", request.request_id)
            error = GenerationFailedError("INTERNAL", "the engine could not take the request")
        self._link.send(Frame.EVENTS, [pack_event(Failed(request.request_id, *pack_error(error)))])

    def _report_load(self) -> None:
        now = time.monotonic()
        if now - self._reported_at >= self._heartbeat_s:
            self._reported_at = now
            self._link.send(Frame.ALIVE, self._engine.load())


LINE_BREAK = "\x1e"  # inside a record of the log, such as one with a traceback, which the front end reads line by line


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", LINE_BREAK)


SWITCH_INTERVAL_S = 0.0005
"""The longest wait of a step for the interpreter while a thread, such as one that loads a draft model, computes in
Python. A step waits after every forward and sampling; by Python's default ten times as long."""

DEFAULT_FACTORY = "specdec.engine.build:build_served_engine"
EngineFactory = Callable[[EngineConfig, Progress], "Engine"]


def main(argv: Sequence[str] | None = None) -> int:
    """Build the engine, serve until CLOSE, and return the exit code."""
    parser = argparse.ArgumentParser(prog="server.engine_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the Unix socket")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--factory", default=DEFAULT_FACTORY, help="module:function that builds the engine")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds between signs of life")
    parser.add_argument("--kv-events", help="KvEventsConfig as JSON; sends the prefix cache's changes")
    args = parser.parse_args(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # A service manager may signal every process of its service; the front end drains, then sends CLOSE.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()  # it reads its socket only between steps; this also ends it while it loads
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    link = ParentLink(socket.socket(fileno=args.fd))
    try:
        # Not model_validate_json, which refuses the defaults that are paths.
        build: EngineFactory = resolve_name(args.factory)
        engine = build(EngineConfig.model_validate(json.loads(args.config)), partial(link.send, Frame.PROGRESS))
        events = KvEventsConfig.model_validate_json(args.kv_events) if args.kv_events else None
        loop = EngineLoop(engine, link, args.heartbeat, events)
        return_freed_memory()
        link.send(Frame.READY, engine.info())
        try:
            loop.run()
        finally:
            engine.close()
    except ParentGoneError:
        return 0
    except Exception as error:
        return _last_words(link, error)
    return 0


def _last_words(link: ParentLink, error: Exception) -> int:
    """Send the reason for the end, and log it in case the front end is gone."""
    refusal = isinstance(error, SpecdecError)
    message = str(error) if refusal else f"{type(error).__name__}: {error}"
    if not refusal:
        _LOG.critical("the engine broke", exc_info=error)
    try:
        link.send(Frame.DIED, refusal, message)
    except ParentGoneError:
        _LOG.warning("the front end is gone")
    return 2 if refusal else 1


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of mallopt(3)
_MMAP_BYTES = 1 << 20
_ARENAS = 2


def bound_malloc() -> None:
    """Keep large blocks out of the C library's heaps, and these few: freed parts of many heaps add up.

    By default a large block raises the size from which blocks are returned to the system at once, and each of gRPC's
    threads gets a heap. Does nothing if the C library has no such call.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)


def return_freed_memory() -> None:
    """Return freed memory from the C library's heaps to the system, if the C library has `malloc_trim`."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # the interpreter would first collect all of torch's objects: seconds on a busy machine
