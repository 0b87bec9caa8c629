"""An engine that knows a book by heart: it continues whatever of it a prompt ends with, one character a step.

A request's ``cache_salt`` that begins with ``slow`` makes a step take 0.02 s, ``slower`` 0.06 s; ``die`` breaks it all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.text_stops import TextCutter
from specdec.core.types import (
    Delta,
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
from tests.server.completion.code_tokenizer import CodeTokenizer

BOOK = '''\
def add(first, second):
    """The sum of two numbers."""
    total = first + second
    return total


def mean(values):
    """The mean of some numbers, 0 of none."""
    if not values:
        return 0
    total = 0
    for value in values:
        total = add(total, value)
    return total / len(values)


print(mean([1, 2, 3]))
'''
END = 300


@dataclass
class _Running:
    request: Request
    text: str
    cutter: TextCutter
    said: int = 0
    shown: int = 0
    started: bool = False


class BookEngine:
    """``load`` tells what was submitted in all as prompt tokens, and what was aborted as prefix hits."""

    def __init__(self, config: EngineConfig) -> None:
        tokenizer = CodeTokenizer()
        self._middle, self._prefix, self._suffix = (
            tokenizer.names[f"<|fim_{n}|>"] for n in ("middle", "prefix", "suffix")
        )
        self._running: dict[str, _Running] = {}
        self._events: list[RequestEvent] = []
        self._aborts = self._submits = 0

    def submit(self, request: Request) -> None:
        ids = request.prompt_ids
        if self._middle in ids:
            above = ids[ids.index(self._prefix) + 1 : ids.index(self._suffix)]
            ids = (*above, *ids[ids.index(self._middle) + 1 :])
        tail = bytes(i for i in ids if i < 256).decode()[-40:] + request.healing_prefix
        found = BOOK.find(tail)
        text = BOOK[found + len(tail) :] if found >= 0 else "?"
        self._running[request.request_id] = _Running(request, text, TextCutter(request.stopping.rules))
        self._submits += 1

    def abort(self, request_id: str) -> bool:
        running = self._running.pop(request_id, None)
        if running is None:
            return False
        self._aborts += 1
        self._events.append(_finished(running, FinishReason.ABORTED))
        return True

    def step(self) -> list[RequestEvent]:
        salts = {running.request.cache_salt for running in self._running.values()}
        if any("slow" in salt for salt in salts):
            time.sleep(0.06 if any("slower" in salt for salt in salts) else 0.02)
        if any("die" in salt for salt in salts):
            raise RuntimeError("told to die")
        events, self._events = self._events, []
        for running in list(self._running.values()):
            events += self._advance(running)
        return events

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request, events = running.request, list[RequestEvent]()
        if not running.started:
            running.started = True
            events.append(Started(request.request_id, 7, len(request.prompt_ids), 0, 0.1))
        limit = request.stopping.max_tokens
        ended, text = None, ""
        if limit != 0:
            char = running.text[running.said : running.said + 1]
            running.said += 1
            cut = running.cutter.feed(char)
            if cut is not None:
                text, ended = running.text[running.shown : cut.place], cut.reason
            elif not char or running.said + len(request.healing_prefix) == limit:
                text = running.text[running.shown : running.said]
                ended = FinishReason.LENGTH if char else FinishReason.EOS
            else:
                text = running.text[running.shown : running.cutter.safe]
            running.shown += len(text)
            events.append(Delta(request.request_id, 0, list(char.encode()) or [END - 1], text))
        if limit == 0 or ended is not None:
            del self._running[request.request_id]
            events.append(_finished(running, ended or FinishReason.LENGTH))
        return events

    def has_work(self) -> bool:
        return bool(self._running or self._events)

    def info(self) -> EngineInfo:
        return EngineInfo(
            "book", None, "int8", "reference", "bitwise", 4096, END, 1 << 16, 8, ("suffix",), (0,), 1, "0", "fp32"
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=len(self._running), prefix_hit_tokens=self._aborts, prompt_tokens=self._submits
        )

    def trace(self, limit: int) -> list[StepTrace]:
        return []

    def close(self) -> None:
        self._running.clear()


def _finished(running: _Running, reason: FinishReason) -> Finished:
    request = running.request
    usage = Usage(len(request.prompt_ids), 64, running.said, 0, 0, len(request.prediction_ids))
    return Finished(request.request_id, 0, reason, None, usage, SpeculationStats(), Timings(0.1, 0.2, 0.3))


def build(config: EngineConfig, progress: ProgressListener) -> BookEngine:
    """The factory the engine process is given."""
    return BookEngine(config)
