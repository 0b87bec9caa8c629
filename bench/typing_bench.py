"""An editor that asks after every key: how long somebody waits, with a session and with single requests."""

from __future__ import annotations

import ast
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from bench.local_server import LocalServer
from bench.workloads.workload import source_of
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.client.client import Client, SessionCall
from specdec.client.prompt import CompletionHints, Fim
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.core.types import Delta, Finished, StoppingParams
from specdec.load.figures import spread


@dataclass(frozen=True, slots=True)
class Stretch:
    """``typed`` comes between ``before`` and ``after``, key by key."""

    name: str
    before: str
    typed: str
    after: str


def find_stretch(place: str, keys: int) -> Stretch:
    """``keys`` characters of the file at ``place``, from the first statement of a function near its middle on.

    Raises:
        ValueError: there is no such file, or no function after which so much text follows.
    """
    source = source_of(place)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    begins = sorted(starts[_first_statement(node) - 1] for node in functions)
    fitting = [begin for begin in begins if begin + keys <= len(source)]
    if not fitting:
        raise ValueError(f"{place}: no function with {keys} characters from its begin to the file's end")
    begin = min(fitting, key=lambda b: abs(b - len(source) // 2))
    begin += len(source[begin:]) - len(source[begin:].lstrip(" "))  # an editor indents by itself
    return Stretch(place, source[:begin], source[begin : begin + keys], source[begin + keys :])


def _first_statement(function: ast.FunctionDef) -> int:
    """Line of the first statement that is no docstring, counted from 1."""
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return function.body[1].lineno if is_text and len(function.body) > 1 else first.lineno


@dataclass(slots=True)
class KeysLog:
    """Seconds of one clock. ``answered_s[i]``: when the first text for the state after key i came, or the news that
    there is none; missing where the next key came first. ``with_text``: the keys whose answer was a text.
    ``prompt_rows``: rows that the engine computed for prompts since the first key, None where its trace does not reach
    back so far; ``warm_step``: its last step before that."""

    pressed_s: list[float] = field(default_factory=list)
    answered_s: dict[int, float] = field(default_factory=dict)
    with_text: set[int] = field(default_factory=set)
    continued: int = 0
    warm_step: int = -1
    prompt_rows: int | None = None

    def press(self, now_s: float) -> int:
        """A key is pressed; its number, from 0."""
        self.pressed_s.append(now_s)
        return len(self.pressed_s) - 1

    def answer(self, key: int, now_s: float, *, text: bool) -> None:
        """News of the state after ``key``: a text, or that there is no more; later ones change nothing."""
        if key not in self.answered_s:
            self.answered_s[key] = now_s
            if text:
                self.with_text.add(key)

    def waits_ms(self, *, text_only: bool = False) -> list[float]:
        """Per key, from its press to the first answer for the text then or later: what is on the screen until then is
        about a text that is gone. A key after which nothing came any more has no wait. text_only: the news that there
        is nothing to suggest is no answer."""
        waits: list[float] = []
        soonest: float | None = None
        for key in range(len(self.pressed_s) - 1, -1, -1):
            at = self.answered_s.get(key) if key in self.with_text or not text_only else None
            if at is not None:
                soonest = at if soonest is None else min(soonest, at)
            if soonest is not None:
                waits.append((soonest - self.pressed_s[key]) * 1e3)
        return waits[::-1]

    @property
    def in_time(self) -> int:
        """Keys answered before the next one."""
        following = [*self.pressed_s[1:], float("inf")]
        return sum(self.answered_s.get(key, float("inf")) < after for key, after in enumerate(following))


_URI, _LANGUAGE = "typed.py", "python"
_HINTS = CompletionHints(mode="middle_or_prefix")
_SETTLE_S = 60.0


# Types a stretch at so many keys per second and asks for so many tokens after each key, after one ask that warms the
# server up; the salt keeps it from finding what others left in the server. Raises CallError: the server failed.
Typist = Callable[[Client, Stretch, float, int, str], Awaitable[KeysLog]]


async def type_in_session(client: Client, stretch: Stretch, keys_per_s: float, max_tokens: int, salt: str) -> KeysLog:
    """A `Typist` of one CompleteSession stream: a key is an edit of one character and an ask."""
    log, done = KeysLog(), asyncio.Event()
    clock = asyncio.get_running_loop().time
    at = len(stretch.before)
    async with client.completion.session() as session:
        setup = pb.SessionSetup(
            completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX),
            stopping=options_pb2.StoppingOptions(max_tokens=max_tokens), cache=options_pb2.CacheOptions(salt=salt),
        )  # fmt: skip
        text = pb.DocumentText(uri=_URI, version=1, text=stretch.before + stretch.after, language=_LANGUAGE)
        await session.send(pb.CompleteSessionRequest(setup=setup, text=text, ask=_ask(1, at, 1)))
        reading = asyncio.create_task(_read_answers(session, log, done, len(stretch.typed) + 1))
        try:
            await _first(done, reading)
            log.warm_step = await _last_step(client)
            began = clock()
            for number, key in enumerate(stretch.typed):
                await asyncio.sleep(max(0.0, began + number / keys_per_s - clock()))
                log.press(clock())
                edit = pb.TextEdit(start=at + number, end=at + number, text=key)
                edits = pb.DocumentEdits(uri=_URI, from_version=number + 1, version=number + 2, edits=[edit])
                ask = _ask(number + 2, at + number + 1, number + 2)
                await session.send(pb.CompleteSessionRequest(edits=edits, ask=ask))
            await asyncio.wait_for(reading, _SETTLE_S)
        finally:
            reading.cancel()
    return log


async def type_with_requests(
    client: Client, stretch: Stretch, keys_per_s: float, max_tokens: int, salt: str
) -> KeysLog:
    """A `Typist` without a session: every key is a Complete call with both texts, and cancels the one before, as
    editors do."""
    log = KeysLog()
    clock = asyncio.get_running_loop().time

    async def ask(key: int, typed: str) -> None:
        gap = Fim(stretch.before + typed, stretch.after, file_name=_URI, language=_LANGUAGE)
        stopping = StoppingParams(max_tokens=max_tokens)
        events = client.completion.complete(gap, _HINTS, stopping=stopping, cache_salt=salt)
        async with aclosing(events):
            async for event in events:
                has_text = isinstance(event, Delta) and bool(event.text)
                if key >= 0 and (has_text or isinstance(event, Finished)):
                    log.answer(key, clock(), text=has_text)

    await ask(-1, "")
    log.warm_step = await _last_step(client)
    began, running = clock(), asyncio.create_task(asyncio.sleep(0))
    for number in range(len(stretch.typed)):
        await asyncio.sleep(max(0.0, began + number / keys_per_s - clock()))
        key = log.press(clock())
        running.cancel()
        await asyncio.wait([running])
        _raise_failure(running)
        running = asyncio.create_task(ask(key, stretch.typed[: number + 1]))
    await asyncio.wait_for(running, _SETTLE_S)
    return log


def _ask(number: int, offset: int, version: int) -> pb.CompletionAsk:
    return pb.CompletionAsk(id=number, cursor=pb.Cursor(uri=_URI, version=version, offset=offset))


async def _read_answers(session: SessionCall, log: KeysLog, warm: asyncio.Event, last: int) -> None:
    """Note answers until that of ask ``last``; ask 1 warms up, ask i + 2 is of key i."""
    clock = asyncio.get_running_loop().time
    async for message in session:
        which = message.WhichOneof("event")
        if which == "started" and message.started.origin == pb.SuggestionStarted.ORIGIN_CONTINUED:
            log.continued += 1
        elif which == "delta" and message.delta.ask_id > 1:
            log.answer(message.delta.ask_id - 2, clock(), text=True)
        elif which == "finished":
            ended = message.finished
            if ended.finish_reason != result_pb2.FINISH_REASON_SUPERSEDED and ended.ask_id > 1:
                log.answer(ended.ask_id - 2, clock(), text=False)
            warm.set()
            if ended.ask_id == last:
                return


async def _first(warm: asyncio.Event, reading: asyncio.Task[None]) -> None:
    """Wait for the answer that warms up, or for the failure of the stream."""
    waiting = asyncio.create_task(warm.wait())
    await asyncio.wait([waiting, reading], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if reading.done():
        reading.result()


def _raise_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


# Files that models may know by heart, and in turn some of ours, which they can not.
PLACES = (
    "sched:", "specdec.engine.scheduler:", "graphlib:", "specdec.core.kv_cache:", "queue:",
    "server.admission:",
)  # fmt: skip
ARMS: dict[str, Typist] = {"session": type_in_session, "requests": type_with_requests}
_REST_S = 10.0
_STEPS = 1024  # of the trace: as many as a call gives


@dataclass(frozen=True, slots=True)
class TypingPlan:
    """``stretches`` of ``keys`` each, of as many files, typed at ``keys_per_s``; suggestions of ``max_tokens``."""

    keys: int = 80
    keys_per_s: float = 8.0
    stretches: int = 2
    max_tokens: int = 32


async def measure_typing(engine: EngineConfig, plan: TypingPlan, note: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able figures: waits of both arms, their ratio at the median, and pages of the cache before and after.

    Raises:
        ChildServerError: the server did not start.
        CallError: it failed.
    """
    stretches = [find_stretch(place, plan.keys) for place in PLACES[: plan.stretches]]
    logs: dict[str, list[KeysLog]] = {name: [] for name in ARMS}
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=None))
    async with LocalServer(config) as server, Client(server.grpc_address) as client:
        info = await client.info()
        pages_before = await _free_pages(client)
        for number, stretch in enumerate(stretches):
            # Who is first finds a processor that was idle; so each arm is first in turn.
            for name in list(ARMS)[:: -1 if number % 2 else 1]:
                note(f"{stretch.name} {name}")
                logs[name].append(await _type(client, ARMS[name], stretch, plan, f"{name}-{number}"))
        pages_after = await _free_pages(client)
    figures = {name: _figures(found) for name, found in logs.items()}
    return {
        "target": info.target, "dtype": info.dtype, "keys_per_s": plan.keys_per_s, "max_tokens": plan.max_tokens,
        "stretches": [f"{s.name}{len(s.before)}+{len(s.typed)}" for s in stretches], **figures,
        "p50_ratio": _ratio(figures, "wait_ms"), "p50_ratio_text": _ratio(figures, "wait_for_text_ms"),
        "p50_ratio_by_stretch": [
            round(statistics.median(a.waits_ms()) / statistics.median(b.waits_ms()), 4)
            for a, b in zip(logs["session"], logs["requests"], strict=True)
        ],
        "pages_before": pages_before, "pages_after": pages_after, "pages_lost": pages_before - pages_after,
    }  # fmt: skip


async def _type(client: Client, typist: Typist, stretch: Stretch, plan: TypingPlan, salt: str) -> KeysLog:
    log = await typist(client, stretch, plan.keys_per_s, plan.max_tokens, salt)
    await _free_pages(client)  # the engine is at rest when the next one begins
    steps = await client.trace(_STEPS)
    if steps and steps[0].step <= log.warm_step + 1:
        log.prompt_rows = sum(step.prefill_rows for step in steps if step.step > log.warm_step)
    return log


async def _last_step(client: Client) -> int:
    return max((step.step for step in await client.trace(1)), default=-1)


def _figures(logs: list[KeysLog]) -> dict[str, Any]:
    own = [(log.answered_s[key] - log.pressed_s[key]) * 1e3 for log in logs for key in sorted(log.answered_s)]
    keys = sum(len(log.pressed_s) for log in logs)
    rows = [(log.prompt_rows, len(log.pressed_s)) for log in logs if log.prompt_rows is not None]
    return {
        "keys": keys,
        "wait_ms": spread([wait for log in logs for wait in log.waits_ms()]),
        "wait_for_text_ms": spread([wait for log in logs for wait in log.waits_ms(text_only=True)]),
        "answered": sum(len(log.answered_s) for log in logs),
        "answered_with_text": sum(len(log.with_text) for log in logs),
        "answered_before_next_key": round(sum(log.in_time for log in logs) / keys, 4),
        "answer_ms": spread(own),
        "continued": sum(log.continued for log in logs),
        "prompt_rows_per_key": round(sum(found for found, _ in rows) / sum(pressed for _, pressed in rows), 2)
        if rows
        else None,
    }


def _ratio(figures: dict[str, dict[str, Any]], name: str) -> float | None:
    session, requests = (figures[arm][name].get("p50") for arm in ARMS)
    return round(session / requests, 4) if session is not None and requests else None


async def _free_pages(client: Client) -> int:
    """Free pages of an idle engine: the value of two equal heartbeats."""
    until, last = time.monotonic() + _REST_S, -1
    while True:
        load = await client.load()
        resting = not load.running_requests and not load.waiting_requests and load.free_pages > 0
        if (resting and load.free_pages == last) or time.monotonic() > until:
            return load.free_pages
        last = load.free_pages if resting else -1
        await asyncio.sleep(1.1)
