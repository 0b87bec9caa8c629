"""The engine process's main loop: commands in, steps, events out."""

from __future__ import annotations

import logging
import time
from typing import Any

from server.engine_admin import EngineAdmin
from server.engine_protocol import EngineLike
from server.frames import Frame
from server.parent_link import ParentLink
from server.request_errors import GenerationFailedError, pack_error
from server.wire import pack_event, pack_load, pack_trace, unpack_request
from specdec.errors import RequestError

_LOG = logging.getLogger(__name__)
_LOADING_POLL_S = 0.02  # how soon an idle engine notices that a draft model is loaded


class EngineLoop:
    """Drives one engine for one front end. ``heartbeat_s``: how often the load is told, busy or idle."""

    def __init__(self, engine: EngineLike, link: ParentLink, heartbeat_s: float) -> None:
        self._engine = engine
        self._link = link
        self._heartbeat_s = heartbeat_s
        self._told_at = time.monotonic()
        self._admin = EngineAdmin(engine, link)

    def run(self) -> None:
        """Serve until the front end says close.

        Raises:
            ParentGoneError: the front end went away.
            Exception: whatever the engine's step raises: it is broken then, and must not go on.
        """
        while self._take_commands():
            if self._engine.has_work():
                events = self._engine.step()
                if events:
                    self._link.send(Frame.EVENTS, [pack_event(event) for event in events])
            self._admin.poll()
            self._tell_load()

    def _take_commands(self) -> bool:
        """Carry out what arrived, waiting for it only when there is no work. False: close was asked for."""
        wait = 0.0
        if not self._engine.has_work():
            wait = max(0.0, self._told_at + self._heartbeat_s - time.monotonic())
            if self._admin.busy:
                wait = min(wait, _LOADING_POLL_S)
        for kind, *rest in self._link.receive(wait):
            if kind == Frame.SUBMIT:
                self._submit(*rest)
            elif kind == Frame.ABORT:
                self._engine.abort(*rest)
            elif kind == Frame.TRACE:
                self._tell_trace(*rest)
            elif kind == Frame.ADMIN:
                self._admin.take(*rest)
            elif kind == Frame.CLOSE:
                return False
            else:
                raise ValueError(f"unknown command {kind!r}")
        return True

    def _submit(self, parts: list[Any]) -> None:
        request = unpack_request(parts)
        try:
            self._engine.submit(request)
        except RequestError as error:
            self._link.send(Frame.REFUSED, request.request_id, pack_error(error))
        except Exception:
            # A bug that one request runs into must not cost the others theirs; a broken engine will fail in step.
            _LOG.exception("submit of request %s raised", request.request_id)
            fault = GenerationFailedError("INTERNAL", "the engine could not take the request")
            self._link.send(Frame.REFUSED, request.request_id, pack_error(fault))

    def _tell_trace(self, number: int, limit: int) -> None:
        steps: list[Any] | None = None
        try:
            steps = [pack_trace(step) for step in self._engine.trace(limit)]
        except Exception:
            # Who looks on must not cost those who generate their requests.
            _LOG.exception("the trace can not be told")
        self._link.send(Frame.TRACE, number, steps)

    def _tell_load(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= self._heartbeat_s:
            self._told_at = now
            self._link.send(Frame.ALIVE, pack_load(self._engine.load()))
