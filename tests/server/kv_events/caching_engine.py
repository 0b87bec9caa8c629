"""The fake engine with the real books of a prefix cache: prompts fill pages, are kept, and push others out.

Tokens are bytes of the prompt's text; imports little, as every engine process begins with it.
"""

from __future__ import annotations

from dataclasses import replace

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.cache_events import CacheRecorder
from specdec.core.kv_cache import KvCacheManager, PagedTokens
from specdec.core.types import EngineInfo, Request
from tests.server.fake_engine import FakeEngine

FACTORY = "tests.server.kv_events.caching_engine:build"
PAGES = 8


class CachingFakeEngine(FakeEngine):
    """A request's pages are cached while it is submitted, and given back."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._kv = KvCacheManager(PAGES, prefix_cache=True)

    def tell_cache(self, recorder: CacheRecorder) -> None:
        self._kv.record(recorder)

    def info(self) -> EngineInfo:
        return replace(super().info(), max_context=PAGES * 64)

    def submit(self, request: Request) -> None:
        super().submit(request)
        paged = PagedTokens(request.prompt_ids, request.cache_salt)
        if self._kv.admit(paged) is not None:
            paged.n_computed = len(paged.tokens) - 1
            self._kv.publish(paged)
            self._kv.release(paged)


def build(config: EngineConfig, progress: ProgressListener) -> CachingFakeEngine:
    """The factory the engine process is given."""
    return CachingFakeEngine(config)
