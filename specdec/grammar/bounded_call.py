"""Runs a library that recurses deeply, or may take for ever, without being taken down by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BoundedCall(Generic[Result]):
    """One call on a thread of its own, with a stack of ``stack_bytes`` (address space; used only as deep as it goes).

    Work that can not be interrupted goes on after `result` gave up; ``running`` tells.
    """

    def __init__(self, work: Callable[[], Result], stack_bytes: int) -> None:
        self._work = work
        self._results: list[Result] = []
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="specdec-grammar", daemon=True)
        before = threading.stack_size(stack_bytes)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    @property
    def running(self) -> bool:
        """Whether the work is not yet done."""
        return self._thread.is_alive()

    def result(self, seconds: float) -> Result:
        """What the work returned.

        Raises:
            TimeoutError: it is not done within ``seconds``.
            ValueError: it raised; with that error's message.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"not done within {seconds:g} s")
        if self._error is not None:
            raise ValueError(self._error)
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # a panic of Rust code is no Exception
            self._error = str(error) or type(error).__name__
