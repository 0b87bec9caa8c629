"""An engine that computes nothing: it returns tokens by the clock, with the time as their text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.config import EngineConfig
from specdec.core.types import (
    Delta,
    DrafterStats,
    EngineInfo,
    EngineLoad,
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
from specdec.models.progress import Progress

_END = ";"
_WIDTH = 18  # digits of a time in nanoseconds


now_ns = time.monotonic_ns  # of the machine: equal in all processes


def stamp(*times_ns: int) -> str:
    """``times_ns`` as text."""
    return "".join(f"{t:0{_WIDTH}d}{_END}" for t in times_ns)


def read_stamps(text: str) -> list[int]:
    """The times in ``text``, in nanoseconds.

    Raises:
        ValueError: the text is not from `stamp`.
    """
    *parts, rest = text.split(_END)
    if rest:
        raise ValueError(f"{text!r} is not a stamp")
    return [int(part) for part in parts]


VOCAB_SIZE = 256


class ByteTokenizer:
    """A tokenizer of bytes, as far as completions of texts need one: without special tokens and chat template."""

    special_ids: frozenset[int] = frozenset()
    has_chat_template = has_tool_template = False
    longest_token = 1

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode("latin-1", "replace"))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(ids).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_id(self, token: str) -> int | None:
        return None

    def special_id(self, name: str) -> int | None:
        return None


NAME = "paced"
TOKENS = 2  # per message
CONTEXT = 1 << 16


def paced_target(step_ms: float) -> str:
    """The configuration's ``target`` for an engine with steps of ``step_ms``."""
    return f"{NAME}:{step_ms:g}"


def build(config: EngineConfig, progress: Progress) -> PacedEngine:
    """The factory for the engine process; the target is from `paced_target`."""
    return PacedEngine(float(config.target.partition(":")[2]) / 1e3)


@dataclass(slots=True)
class _Running:
    request: Request
    submitted_ns: int
    emitted: int = 0


class PacedEngine:
    """Returns a request's first message at once, and the others one per step of ``step_s`` seconds.

    A message has `TOKENS` tokens. Its text is the time at which it left the engine; in the first message the request's
    arrival time precedes it. A request ends at ``max_tokens``.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._aborted: list[RequestEvent] = []
        self._tick_s = 0.0

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        self._running[request.request_id] = _Running(request, now_ns())

    def abort(self, request_id: str) -> bool:
        running = self._running.pop(request_id, None)
        if running is not None:
            self._aborted.append(_finished(running, FinishReason.ABORTED))
        return running is not None

    def step(self) -> list[RequestEvent]:
        """Return the first messages of new requests at once, else the next message of all at the end of the step."""
        events, self._aborted = self._aborted, []
        chosen = [running for running in self._running.values() if not running.emitted]
        if not chosen:
            chosen = list(self._running.values())
            now = time.monotonic()
            self._tick_s = max(self._tick_s + self._step_s, now)
            if now - self._tick_s < 0:
                time.sleep(self._tick_s - now)
        elif len(chosen) == len(self._running):
            self._tick_s = time.monotonic()
        for running in chosen:
            events += self._advance(running)
        return events

    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def info(self) -> EngineInfo:
        return EngineInfo(
            target=NAME, draft=None, dtype="int8", kernels="reference", numeric_mode="bitwise", max_context=CONTEXT,
            vocab_size=VOCAB_SIZE, kv_tokens=1 << 20, max_batch=256, drafters=(), eos_ids=(), threads=1, version="0",
            kv_dtype="fp32",
        )  # fmt: skip

    def load(self) -> EngineLoad:
        return EngineLoad(running_requests=len(self._running), total_pages=1 << 14, free_pages=1 << 14)

    def trace(self, limit: int) -> list[StepTrace]:
        return []

    def close(self) -> None:
        self._running.clear()

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request, limit = running.request, running.request.stopping.max_tokens or TOKENS
        events: list[RequestEvent] = []
        times = [now_ns()]
        if not running.emitted:
            events.append(Started(request.request_id, 1, len(request.prompt_ids), 0, 0.0))
            times.insert(0, running.submitted_ns)
        count = min(TOKENS, limit - running.emitted)
        events.append(Delta(request.request_id, 0, [ord(" ")] * count, stamp(*times)))
        running.emitted += count
        if running.emitted >= limit:
            del self._running[request.request_id]
            events.append(_finished(running, FinishReason.LENGTH))
        return events


def _finished(running: _Running, reason: FinishReason) -> Finished:
    steps = -(-running.emitted // TOKENS)
    by_drafter = {"suffix": DrafterStats(2 * steps, steps)}
    stats = SpeculationStats(steps, steps, 2 * steps, steps, [0, steps], by_drafter)
    usage = Usage(len(running.request.prompt_ids), 0, running.emitted)
    return Finished(running.request.request_id, 0, reason, None, usage, stats, Timings(0.0, 0.1, 1.0, 0.1, 0.5))
