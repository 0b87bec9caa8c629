"""Real engines over tiny random models, built once per test session."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from specdec.config import EngineConfig, KvDtype, SpeculationConfig
from specdec.core.kv_cache import KvCacheManager
from specdec.core.types import Delta, Failed, Finished, Request, RequestEvent
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from tests.models.tiny import make_tiny_model


@functools.cache
def tiny_parts(
    family: str = "llama", dtype: str = "int8", kernels: str = "native", kv_dtype: KvDtype = "auto"
) -> EngineParts:
    """Parts with the suffix drafter and a 2-layer draft model of the same vocabulary, on a small KV cache."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-test-"))
    target = make_tiny_model(family, folder / "target")
    draft = make_tiny_model("llama", folder / "draft", seed=5)
    config = EngineConfig(
        target=str(target), draft=str(draft), dtype=dtype, kernels=kernels, threads=2,  # type: ignore[arg-type]
        cache_dir=Path("~/.cache/specdec"), kv_tokens=64 * 40, max_batch=8, max_step_rows=96, prefill_chunk=64,
        max_context=448, kv_dtype=kv_dtype,
        speculation=SpeculationConfig(
            drafters=("suffix", "model"), max_nodes=7, max_depth=5, width=3, profile_s=0
        ),
    )  # fmt: skip
    return build_parts(config)


def tiny_engine(parts: EngineParts | None = None, pages: int | None = None, **changes: Any) -> Engine:
    """A fresh engine on shared weights; ``changes`` alter the engine config, ``pages`` the size of the cache."""
    parts = parts or tiny_parts()
    config = parts.config.model_copy(update=changes)
    n_pages = pages or parts.info.kv_tokens // 64
    info = dataclasses.replace(parts.info, max_context=min(parts.info.max_context, n_pages * 64 - 64))
    kv = KvCacheManager(n_pages, prefix_cache=config.prefix_cache)
    return Engine(dataclasses.replace(parts, config=config, info=info, kv=kv))


def run_all(engine: Engine, requests: Seq[Request], limit: int = 5000) -> list[RequestEvent]:
    """Submit everything, step until idle, return all events."""
    for request in requests:
        engine.submit(request)
    return drain(engine, limit)


def drain(engine: Engine, limit: int = 5000) -> list[RequestEvent]:
    """Step until idle."""
    events: list[RequestEvent] = []
    for _ in range(limit):
        if not engine.has_work():
            return events
        events += engine.step()
    raise AssertionError(f"still busy after {limit} steps")


def tokens_of(events: Seq[RequestEvent], request_id: str, index: int = 0) -> list[int]:
    """All token ids of one sample."""
    return [
        t
        for e in events
        if isinstance(e, Delta) and (e.request_id, e.index) == (request_id, index)
        for t in e.token_ids
    ]


def text_of(events: Seq[RequestEvent], request_id: str, index: int = 0) -> str:
    """All text of one sample."""
    return "".join(e.text for e in events if isinstance(e, Delta) and (e.request_id, e.index) == (request_id, index))


def finish_of(events: Seq[RequestEvent], request_id: str, index: int = 0) -> Finished:
    """The Finished event of one sample."""
    (found,) = [e for e in events if isinstance(e, Finished) and (e.request_id, e.index) == (request_id, index)]
    return found


def failures(events: Seq[RequestEvent]) -> list[Failed]:
    """All Failed events."""
    return [e for e in events if isinstance(e, Failed)]
