"""An engine that echoes its prompt, one token a step, and misbehaves on command.

Token ids are bytes, so text and ids are the same thing. A request's ``cache_salt`` is its script:
``slow`` 0.05 s a step, ``die`` raises in step, ``exit`` leaves the process, ``hang`` sleeps in step, ``broken``
fails the request, ``full``, ``bug`` and ``long`` make submit raise, ``untold`` every trace from then on. The
configuration's ``target`` scripts the start.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.types import (
    Delta,
    DrafterStats,
    DrafterTrace,
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
    TokenLogprobs,
    Usage,
)
from specdec.errors import DuplicateRequestError, ModelError, PromptTooLongError, QueueFullError

DEFAULT_SEED = 4242
MAX_CONTEXT = 128
VOCAB_SIZE = 256
WEIGHT_BYTES = 4_321
FINGERPRINT = "0123456789abcdef"
TRACE_STEPS = 40


@dataclass
class _Running:
    request: Request
    arrival_s: float
    started: bool = False
    emitted: dict[int, int] = field(default_factory=dict)


class FakeEngine:
    """Sample i of a request echoes the prompt shifted by i; ``width`` tokens come per step."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._running: dict[str, _Running] = {}
        self._events: list[RequestEvent] = []
        self._aborts = 0
        self._deadline_s = 0.0
        self._untold = False
        self._steps = 0
        self._trace: deque[StepTrace] = deque(maxlen=TRACE_STEPS)

    def submit(self, request: Request) -> None:
        if request.request_id in self._running:
            raise DuplicateRequestError("twice")
        if request.cache_salt == "full":
            raise QueueFullError(7, 2.5)
        if request.cache_salt == "long":
            raise PromptTooLongError(11, 12)
        if request.cache_salt == "bug":
            raise RuntimeError("a secret of the inside")
        self._deadline_s = request.deadline_s or 0.0
        self._untold = self._untold or request.cache_salt == "untold"
        running = _Running(request, time.monotonic(), emitted=dict.fromkeys(range(request.sampling.n), 0))
        self._running[request.request_id] = running

    def abort(self, request_id: str) -> bool:
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self._aborts += 1
        self._events += [_finished(running, i, FinishReason.ABORTED) for i in running.emitted]
        return True

    def step(self) -> list[RequestEvent]:
        events, self._events = self._events, []
        salts = {running.request.cache_salt for running in self._running.values()}
        if "slow" in salts:
            time.sleep(0.05)
        if "die" in salts:
            raise RuntimeError("the fake engine was told to die")
        if "exit" in salts:
            os._exit(7)
        if "hang" in salts:
            time.sleep(3600)
        n = len(self._running)
        for running in list(self._running.values()):
            events += self._advance(running)
        self._steps += 1
        self._trace.append(fake_step(self._steps, n))
        return events

    def has_work(self) -> bool:
        return bool(self._running or self._events)

    def info(self) -> EngineInfo:
        return EngineInfo(
            target="fake", draft="fake-draft", dtype="int8", kernels="reference", numeric_mode="bitwise",
            max_context=MAX_CONTEXT, vocab_size=VOCAB_SIZE, kv_tokens=4096, max_batch=8, drafters=("suffix",),
            eos_ids=(0,), threads=1, version="0", kv_dtype="fp32", weight_bytes=WEIGHT_BYTES,
            numeric_fingerprint=FINGERPRINT,
        )  # fmt: skip

    def load(self) -> EngineLoad:
        """For tests to see: the prefix figure counts aborts, the rate is the deadline of the last request."""
        return EngineLoad(
            running_requests=len(self._running),
            total_pages=64,
            tokens_per_second=self._deadline_s,
            prefix_hit_tokens=self._aborts,
        )

    def trace(self, limit: int) -> list[StepTrace]:
        if self._untold:
            raise RuntimeError("a secret of the inside")
        return list(self._trace)[-limit:]

    def close(self) -> None:
        self._running.clear()

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request = running.request
        events: list[RequestEvent] = []
        if not running.started:
            running.started = True
            seed = DEFAULT_SEED if request.sampling.seed is None else request.sampling.seed
            events.append(Started(request.request_id, seed, len(request.prompt_ids), 3, 0.5, FINGERPRINT))
        if request.cache_salt == "broken":
            del self._running[request.request_id]
            return [*events, Failed(request.request_id, "MODEL_BROKEN", "no finite logit")]
        late = request.deadline_s is not None and time.monotonic() - running.arrival_s > request.deadline_s
        for index in list(running.emitted):
            if late:
                events.append(_finished(running, index, FinishReason.DEADLINE))
                del running.emitted[index]
            else:
                events += self._emit(running, index)
        if not running.emitted:
            del self._running[request.request_id]
        return events

    def _emit(self, running: _Running, index: int) -> list[RequestEvent]:
        request, at = running.request, running.emitted[index]
        asked = request.stopping.max_tokens
        limit = len(request.prompt_ids) if asked is None else min(asked, len(request.prompt_ids))
        take = min(request.speculation.width or 1, limit - at)
        prompt = request.prompt_ids
        ids = [prompt[(at + index + k) % len(prompt)] for k in range(take)]
        running.emitted[index] += take
        events: list[RequestEvent] = []
        if ids:
            text = bytes(ids).decode("latin-1") if request.output.text else ""
            wanted = request.output.logprobs is not None
            logprobs = [TokenLogprobs(t, -0.5, [(t, -0.5), (1, -1.25)]) for t in ids] if wanted else []
            events.append(Delta(request.request_id, index, ids, text, logprobs))
        if running.emitted[index] >= limit:
            events.append(_finished(running, index, FinishReason.LENGTH))
            del running.emitted[index]
        return events


def _finished(running: _Running, index: int, reason: FinishReason) -> Finished:
    request = running.request
    n_prompt, n_prediction = len(request.prompt_ids), len(request.prediction_ids)
    expected = sum(a == b for a, b in zip(request.prompt_ids, request.prediction_ids, strict=False))
    return Finished(
        running.request.request_id,
        index,
        reason,
        None,
        Usage(n_prompt, 3, running.emitted[index], 0, expected, n_prediction - expected),
        SpeculationStats(5, 3, 6, 3, [1, 1, 1], {"suffix": DrafterStats(4, 3), "idle": DrafterStats()}),
        Timings(0.5, 1.5, 2.5, 0.25, 0.75),
    )


def fake_step(step: int, sequences: int) -> StepTrace:
    """A step whose figures tell their names apart, some of them numpy's as a controller's may be."""
    parts = [DrafterTrace("suffix", "free", sequences, 5, 4, 3, np.float64(2.5), 0.125), DrafterTrace("model", "off")]
    return StepTrace(
        step=step, at_s=step / 8, sequences=sequences, rows=sequences + 4, prefill_rows=2, context=17.5,
        candidates=np.int64(5), budget=np.int64(4), predicted_tokens=np.float32(3.5), realised_tokens=4,
        predicted_draft_ms=0.25, realised_draft_ms=0.5, predicted_verify_ms=8.0, realised_verify_ms=9.0, plan_ms=0.375,
        commit_ms=0.125, control_ms=0.0625, drafters=parts, replay={"not": "told"},
    )  # type: ignore[arg-type]  # fmt: skip


def build(config: EngineConfig, progress: ProgressListener) -> FakeEngine:
    """The factory the engine process is given."""
    progress("load fake", 1, 2)
    if config.target == "missing":
        raise ModelError("model 'missing' can not be found; fetch it")
    if config.target == "crash":
        raise RuntimeError("crashed while loading")
    progress("load fake", 2, 2)
    return FakeEngine(config)


def build_behind_the_tokenizer(config: EngineConfig, progress: ProgressListener) -> FakeEngine:
    """A factory that waits, for a while, for a file beside the model's."""
    until = time.monotonic() + 20.0
    while not (Path(config.target) / "tokenizer-read").exists():
        if time.monotonic() > until:
            raise RuntimeError("nobody read the tokenizer meanwhile")
        time.sleep(0.01)
    return FakeEngine(config)
