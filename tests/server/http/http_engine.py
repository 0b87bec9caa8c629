"""The fake engine with a prefill that takes its time: salt ``prefill``, or ``mute``, which says that it began."""

from __future__ import annotations

import time

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.types import RequestEvent, Started
from tests.server import fake_engine

FACTORY = "tests.server.http.http_engine:build"
PREFILL_STEPS = 200


class HttpEngine(fake_engine.FakeEngine):
    """A request of that salt says nothing for `PREFILL_STEPS` steps of 0.02 s."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._prefilled: dict[str, int] = {}

    def step(self) -> list[RequestEvent]:
        if any(running.request.cache_salt == "prefill" for running in self._running.values()):
            time.sleep(0.02)
        return super().step()

    def _advance(self, running: fake_engine._Running) -> list[RequestEvent]:
        request_id = running.request.request_id
        if running.request.cache_salt == "prefill":
            done = self._prefilled[request_id] = self._prefilled.get(request_id, 0) + 1
            if done <= PREFILL_STEPS:
                return []
        if running.request.cache_salt == "mute":
            time.sleep(0.02)
            begins, running.started = not running.started, True
            return [Started(request_id, 0, len(running.request.prompt_ids), 0, 0.5, "")] if begins else []
        return super()._advance(running)


def build(config: EngineConfig, progress: ProgressListener) -> HttpEngine:
    """The factory the engine process is given."""
    fake_engine.build(config, progress)
    return HttpEngine(config)
