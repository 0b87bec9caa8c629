"""A draft model that is loaded while the engine goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class DraftLoad:
    """Runs ``load`` in a thread of its own, which the process does not wait for at its end. ``number``: of the call
    that asked for it."""

    def __init__(self, number: int, load: Callable[[], Any]) -> None:
        self.number = number
        self._load = load
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="draft-load", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What ``load`` gave, once it is done; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._load()
        except BaseException as error:  # told to who asked, in the engine's own thread
            self._error = error
