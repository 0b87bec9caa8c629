"""Log lines that can wait until whoever waits for the server has been served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger(__name__)
HELD_S = 0.02

Fields = Callable[[], dict[str, Any]]


class HeldLines:
    """Lines of ``logger``, INFO, written up to `HELD_S` seconds late where they come from an event loop: a client that
    just got its answer may have sent its next call, and other people's tokens may be there."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._held: list[tuple[str, float, Fields]] = []
        self._due = self._closed = False

    @property
    def wanted(self) -> bool:
        """Whether anybody would see a line."""
        return self._logger.isEnabledFor(logging.INFO)

    def say(self, message: str, at_s: float, fields: Fields) -> None:
        """Write ``message`` as of ``at_s`` (Unix time) with what ``fields`` gives then."""
        self._held.append((message, at_s, fields))
        if self._due:
            return
        try:
            loop = None if self._closed else asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None:
            self._write()
        else:
            self._due = True
            loop.call_later(HELD_S, self._write)

    def close(self) -> None:
        """Write what is held, and hold nothing from now on. May be called from any thread."""
        self._closed = True
        self._write()

    def _write(self) -> None:
        self._due = False
        held, self._held = self._held, []
        for message, at_s, fields in held:
            try:
                extra = {"fields": fields()}
            except Exception:
                _LOG.exception("a line of %s is lost", self._logger.name)
                continue
            line = self._logger.makeRecord(self._logger.name, logging.INFO, "", 0, message, (), None, extra=extra)
            line.created, line.msecs = at_s, int(at_s % 1 * 1e3)
            self._logger.handle(line)
