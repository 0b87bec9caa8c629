"""The fake engine of `tests.server.fake_engine`, which operators can change too.

What stands behind the last ``/`` of a cache salt is the script, so that tenants have theirs; a request with the text
``whoami`` is answered with its whole salt, its id and its priority. A draft's name is its script: ``slow`` takes half a
second to load, ``missing`` and ``broken`` fail, ``unfit`` fails when it is put in place.
"""

from __future__ import annotations

import dataclasses
import time

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.types import EngineInfo, Request
from specdec.errors import ConfigError, ModelError
from tests.server.fake_engine import FakeEngine

FLUSHED = 7


class FakeAdminEngine(FakeEngine):
    """Starts with the configuration's draft."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._draft = config.draft

    def submit(self, request: Request) -> None:
        if bytes(request.prompt_ids).endswith(b"whoami"):
            told = f"{request.cache_salt} {request.request_id.partition(':')[2]} {request.priority}"
            request = dataclasses.replace(request, prompt_ids=tuple(told.encode()))
        super().submit(dataclasses.replace(request, cache_salt=request.cache_salt.rpartition("/")[2]))

    def info(self) -> EngineInfo:
        drafters = ("suffix", *(["model"] if self._draft else []))
        return dataclasses.replace(super().info(), draft=self._draft, drafters=drafters)

    def flush_cache(self) -> int:
        return FLUSHED

    def load_draft(self, draft: str, dtype: str | None) -> str:
        if draft == "missing":
            raise ModelError("model 'missing' can not be found; fetch it")
        if draft == "broken":
            raise RuntimeError("a secret of the inside")
        if draft == "slow":
            time.sleep(0.5)
        return draft if dtype is None else f"{draft}-{dtype}"

    def swap_draft(self, draft: str | None) -> EngineInfo:
        if draft == "unfit":
            raise ConfigError("engine.draft: it does not fit")
        self._draft = draft
        return self.info()


def build(config: EngineConfig, progress: ProgressListener) -> FakeAdminEngine:
    """The factory the engine process is given."""
    return FakeAdminEngine(config)
