"""An engine that answers by script at the pace it is told, over the real block tables of the prefix cache.

Its target says ``scripted:first_ms:step_ms:pages``: until a request's first token (it begins at once), between tokens,
and the pages of the cache. The answer to a prompt is a text that follows from it alone, so any replica gives the same.
With a further word ``broken`` every request fails, with ``slots=N`` so many run at a time and others wait. The numeric
fingerprint follows from ``engine.dtype``.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from hashlib import blake2b

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.cache_events import CacheRecorder
from specdec.core.kv_cache import KvCacheManager, PagedTokens
from specdec.core.types import (
    Delta,
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    StepTrace,
    Timings,
    Usage,
)
from tests.server.fake_tokenizer import BOS, FakeTokenizer

_LONGEST_SLEEP_S = 0.005
MAX_TOKENS = 16


class ScriptedTokenizer(FakeTokenizer):
    """Bytes, and the marks of a gap, so that fill-in-the-middle works too."""

    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    special_ids = frozenset({BOS, 256, 257, 258})

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:  # type: ignore[override]
        return super().decode([i for i in ids if i < 256], skip_special=skip_special)

    def special_id(self, name: str) -> int | None:
        return 256 + self.names.index(name) if name in self.names else super().special_id(name)


def answer_to(prompt: list[int] | tuple[int, ...], count: int) -> list[int]:
    """``count`` lower-case letters that follow from ``prompt``."""
    seed = blake2b(repr(list(prompt)).encode(), digest_size=32).digest()
    return [ord("a") + blake2b(b"%d" % i, key=seed, digest_size=1).digest()[0] % 26 for i in range(count)]


@dataclass(slots=True)
class _Running:
    request: Request
    due_s: float
    paged: PagedTokens
    cached: int
    answer: list[int]
    emitted: int
    resumed: int
    started: bool = False


class ScriptedEngine:
    """``slots`` requests at a time."""

    def __init__(
        self,
        first_s: float,
        step_s: float,
        pages: int,
        *,
        slots: int = 256,
        fingerprint: str = "",
        broken: bool = False,
    ) -> None:
        self._first_s, self._step_s, self._broken = first_s, step_s, broken
        self._slots, self._fingerprint = slots, fingerprint
        self._kv = KvCacheManager(pages, prefix_cache=True)
        self._running: dict[str, _Running] = {}
        self._aborted: list[RequestEvent] = []
        self._prompt_tokens = self._hit_tokens = 0

    def tell_cache(self, recorder: CacheRecorder) -> None:
        self._kv.record(recorder)

    def submit(self, request: Request) -> None:
        paged = PagedTokens(request.prompt_ids, request.cache_salt)
        hit = self._kv.admit(paged)
        assert hit is not None, "the script's cache is too small for what runs at once"
        self._prompt_tokens += len(request.prompt_ids)
        self._hit_tokens += hit.n_tokens
        count = MAX_TOKENS if request.stopping.max_tokens is None else request.stopping.max_tokens
        answer = answer_to(request.prompt_ids, count)
        had = 0 if request.resume is None else len(request.resume.token_ids)
        self._running[request.request_id] = _Running(request, math.inf, paged, hit.n_tokens, answer, had, had)

    def abort(self, request_id: str) -> bool:
        running = self._running.pop(request_id, None)
        if running is not None:
            self._kv.release(running.paged)
            self._aborted.append(_finished(running, FinishReason.ABORTED))
        return running is not None

    def step(self) -> list[RequestEvent]:
        events, self._aborted = self._aborted, []
        for running in list(self._running.values())[: self._slots]:
            if not running.started:
                running.started, running.due_s = True, time.monotonic() + self._first_s
                request, numbers = running.request, self._fingerprint
                size, had = len(request.prompt_ids), running.resumed
                events.append(Started(request.request_id, 1, size, running.cached, 0.0, numbers, had))
        if events or not self._running:
            return events
        wait = min(running.due_s for running in self._running.values()) - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, _LONGEST_SLEEP_S))
        now = time.monotonic()
        for running in [running for running in self._running.values() if running.due_s <= now]:
            events += self._advance(running)
        return events

    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def info(self) -> EngineInfo:
        return EngineInfo(
            target="scripted", draft=None, dtype="int8", kernels="reference", numeric_mode="bitwise",
            max_context=1 << 14, vocab_size=259, kv_tokens=64 * self._kv.n_total, max_batch=self._slots, drafters=(),
            eos_ids=(), threads=1, version="0", kv_dtype="fp32", numeric_fingerprint=self._fingerprint,
        )  # fmt: skip

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=len(self._running), total_pages=self._kv.n_total, free_pages=self._kv.n_free,
            prompt_tokens=self._prompt_tokens, prefix_hit_tokens=self._hit_tokens,
        )  # fmt: skip

    def trace(self, limit: int) -> list[StepTrace]:
        return []

    def close(self) -> None:
        self._running.clear()

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request, events = running.request, list[RequestEvent]()
        if running.emitted == running.resumed:
            running.paged.n_computed = len(request.prompt_ids) - 1
            self._kv.publish(running.paged)
        if self._broken:
            self.abort(request.request_id)
            self._aborted.clear()
            return [*events, Failed(request.request_id, "BROKEN", "it is in the script")]
        if running.answer[running.emitted : running.emitted + 1]:
            token = running.answer[running.emitted]
            events.append(Delta(request.request_id, 0, [token], chr(token)))
            running.emitted += 1
            running.due_s += self._step_s
        if running.emitted == len(running.answer):
            del self._running[request.request_id]
            self._kv.release(running.paged)
            events.append(_finished(running, FinishReason.LENGTH))
        return events


def _finished(running: _Running, reason: FinishReason) -> Finished:
    prompt, resumed = len(running.request.prompt_ids), running.resumed
    usage = Usage(prompt, running.cached, running.emitted, resumed_tokens=resumed)
    return Finished(running.request.request_id, 0, reason, None, usage, SpeculationStats(), Timings())


def build(config: EngineConfig, progress: ProgressListener) -> ScriptedEngine:
    """The factory that the engine process is given."""
    first_ms, step_ms, pages, *words = config.target.split(":")[1:]
    slots = next((int(word.removeprefix("slots=")) for word in words if word.startswith("slots=")), 256)
    return ScriptedEngine(
        float(first_ms) / 1e3, float(step_ms) / 1e3, int(pages),
        slots=slots, fingerprint=f"numbers-{config.dtype}", broken="broken" in words,
    )  # fmt: skip
