"""An event loop with a virtual clock: sleeping takes no time, and every time is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and for nothing that time would bring"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while all tasks sleep, or by `block`."""

    def __init__(self) -> None:
        self.clock = _Selector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s

    def block(self, seconds: float) -> None:
        """Simulate work that blocks the loop."""
        self.clock.now_s += seconds


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``work`` in a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
