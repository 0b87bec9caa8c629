"""Types in an editor session that asks after every key, and measures how long suggestions take."""

from __future__ import annotations

import ast
import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import grpc

from bench.engine_bench import BenchError
from bench.local_server import LocalServer
from bench.workloads.workload import source_of
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.client.client import Client, SessionCall
from specdec.client.connection import CallError
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.load.figures import spread


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a file that is typed key by key."""

    name: str
    before: str  # text before the typed part
    typed: str
    after: str  # text behind it


def find_stretch(place: str, keys: int) -> Stretch:
    """``keys`` characters of a source file, from the first statement of a function near its middle.

    place: as `source_of` takes it.

    Raises:
        ValueError: there is no such file.
        BenchError: no function is followed by so much text.
    """
    source = source_of(place)
    lines = source.splitlines(keepends=True)
    starts = list(accumulate(map(len, lines), initial=0))
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    begins = sorted(starts[_first_statement(node) - 1] for node in functions)
    fitting = [begin for begin in begins if begin + keys <= len(source)]
    if not fitting:
        raise BenchError(f"{place} has no function that is followed by {keys} characters; type fewer keys")
    begin = min(fitting, key=lambda b: abs(b - len(source) // 2))
    begin += len(source[begin:]) - len(source[begin:].lstrip(" "))  # editors indent automatically
    return Stretch(place, source[:begin], source[begin : begin + keys], source[begin + keys :])


def _first_statement(function: ast.FunctionDef) -> int:
    """Line number (from 1) of the first statement that is not a docstring."""
    documented = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.body[1 if documented else 0].lineno


@dataclass(slots=True)
class KeysLog:
    """Keys and answers of one stretch. Times are seconds of one clock; keys are numbered from 0."""

    pressed_s: list[float] = field(default_factory=list)
    answered_s: dict[int, float] = field(default_factory=dict)
    """By key: time of the first answer, a text or its absence, for the document after that key. Superseded asks have
    none."""
    with_text: set[int] = field(default_factory=set)  # keys whose answer was a text
    continued: int = 0  # answers that continued an earlier suggestion
    warm_step: int = -1  # the engine's last step before the first key
    prompt_rows: int | None = None  # prompt rows computed since then; None if the trace does not reach back so far

    def answer(self, key: int, now_s: float, *, text: bool) -> None:
        """Record an answer for the document after ``key``; only the first counts."""
        if key not in self.answered_s:
            self.answered_s[key] = now_s
            if text:
                self.with_text.add(key)

    def waits_ms(self) -> list[float]:
        """Per key, the time until the first answer for that document or a later one; keys without one are left out.

        An answer for an earlier document does not count: it shows text that has changed.
        """
        answered_s = [self.answered_s.get(key, math.inf) for key in range(len(self.pressed_s))]
        soonest_s = list(accumulate(reversed(answered_s), min))[::-1]
        waits = zip(self.pressed_s, soonest_s, strict=True)
        return [(soonest - pressed) * 1e3 for pressed, soonest in waits if soonest < math.inf]

    @property
    def in_time(self) -> int:
        """Number of keys answered before the next one."""
        following = [*self.pressed_s[1:], math.inf]
        return sum(self.answered_s.get(key, math.inf) < after for key, after in enumerate(following))


_URI, _LANGUAGE = "typed.py", "python"
_SETTLE_S = 60.0  # time for the last answer


async def type_in_session(client: Client, stretch: Stretch, plan: TypingPlan, salt: str) -> KeysLog:
    """Type a stretch over one CompleteSession stream, after one ask that warms the server up.

    salt: separates the prefix cache from other stretches'.

    Raises:
        CallError: the server failed, or refused an ask.
        BenchError: it did not answer the last one.
    """
    log = KeysLog()
    clock = asyncio.get_running_loop().time
    at = len(stretch.before)
    async with client.completion.session() as session:
        setup = pb.SessionSetup(
            completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX),
            stopping=options_pb2.StoppingOptions(max_tokens=plan.max_tokens),
            cache=options_pb2.CacheOptions(salt=salt),
        )  # fmt: skip
        text = pb.DocumentText(uri=_URI, version=1, text=stretch.before + stretch.after, language=_LANGUAGE)
        await session.send(pb.CompleteSessionRequest(setup=setup, text=text, ask=_ask(1, at, 1)))
        await _read_answers(session, log, 1)
        log.warm_step = max((step.step for step in await client.trace(1)), default=-1)
        reading = asyncio.create_task(_read_answers(session, log, len(stretch.typed) + 1))
        try:
            began = clock()
            for number, key in enumerate(stretch.typed):
                await asyncio.sleep(max(0.0, began + number / plan.keys_per_s - clock()))
                log.pressed_s.append(clock())
                edit = pb.TextEdit(start=at + number, end=at + number, text=key)
                edits = pb.DocumentEdits(uri=_URI, from_version=number + 1, version=number + 2, edits=[edit])
                ask = _ask(number + 2, at + number + 1, number + 2)
                await session.send(pb.CompleteSessionRequest(edits=edits, ask=ask))
            await asyncio.wait_for(reading, _SETTLE_S)
        except TimeoutError:
            raise BenchError(f"{stretch.name}: no answer to the last key within {_SETTLE_S:g} s") from None
        finally:
            reading.cancel()
    return log


def _ask(number: int, offset: int, version: int) -> pb.CompletionAsk:
    return pb.CompletionAsk(id=number, cursor=pb.Cursor(uri=_URI, version=version, offset=offset))


async def _read_answers(session: SessionCall, log: KeysLog, last: int) -> None:
    """Record answers until that of ask ``last``. Ask 1 is the warm-up; ask i + 2 belongs to key i."""
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
            if ended.ask_id == last:
                return
        elif which == "refused":
            raise _refusal(message.refused)


def _refusal(refused: pb.AskRefused) -> CallError:
    code = next(code for code in grpc.StatusCode if code.value[0] == refused.code)
    return CallError(code, f"ask {refused.ask_id} was refused: {refused.message}", reason=refused.reason)


# Files of the standard library, which models may know by heart, alternate with ours, which they cannot.
PLACES = (
    "sched:", "specdec.engine.scheduler:", "graphlib:", "specdec.core.kv_cache:", "queue:",
    "server.admission:",
)  # fmt: skip
_REST_S = 10.0  # longest time until the engine is idle
_REST_POLL_S = 1.1  # the engine reports its load once a second
_STEPS = 1024  # of the trace; the most that a call returns


@dataclass(frozen=True, slots=True)
class TypingPlan:
    keys: int = 80  # of each stretch
    keys_per_s: float = 8.0
    stretches: int = 2  # number of files
    max_tokens: int = 32  # of a suggestion


async def measure_typing(engine: EngineConfig, plan: TypingPlan, note: Callable[[str], None]) -> dict[str, Any]:
    """JSON-able figures of typing in a session on a new server.

    Raises:
        ChildServerError: the server did not start.
        CallError: a call failed.
    """
    stretches = [find_stretch(place, plan.keys) for place in PLACES[: plan.stretches]]
    logs: list[KeysLog] = []
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=None))
    async with LocalServer(config) as server, Client(server.grpc_address) as client:
        info = await client.info()
        for number, stretch in enumerate(stretches):
            note(f"typing in {stretch.name.removesuffix(':')}")
            log = await type_in_session(client, stretch, plan, str(number))
            await _until_idle(client)
            steps = await client.trace(_STEPS)
            if steps and steps[0].step <= log.warm_step + 1:
                log.prompt_rows = sum(step.prefill_rows for step in steps if step.step > log.warm_step)
            logs.append(log)
    return {
        "target": info.target, "dtype": info.dtype, "keys_per_s": plan.keys_per_s, "max_tokens": plan.max_tokens,
        "stretches": [f"{s.name}{len(s.before)}+{len(s.typed)}" for s in stretches], **figures_of(logs),
    }  # fmt: skip


def figures_of(logs: list[KeysLog]) -> dict[str, Any]:
    own = [(log.answered_s[key] - log.pressed_s[key]) * 1e3 for log in logs for key in sorted(log.answered_s)]
    keys = sum(len(log.pressed_s) for log in logs)
    rows = [(log.prompt_rows, len(log.pressed_s)) for log in logs if log.prompt_rows is not None]
    return {
        "keys": keys,
        "wait_ms": spread([wait for log in logs for wait in log.waits_ms()]),
        "answer_ms": spread(own),
        "answered": sum(len(log.answered_s) for log in logs),
        "answered_with_text": sum(len(log.with_text) for log in logs),
        "answered_before_next_key": round(sum(log.in_time for log in logs) / keys, 4),
        "continued": sum(log.continued for log in logs),
        "prompt_rows_per_key": round(sum(found for found, _ in rows) / sum(pressed for _, pressed in rows), 2)
        if rows
        else None,
    }


async def _until_idle(client: Client) -> None:
    """Wait until the engine reports no request in two heartbeats, for at most `_REST_S` seconds."""
    until, idle = time.monotonic() + _REST_S, 0
    while idle < 2 and time.monotonic() < until:
        load = await client.load()
        idle = 0 if load.running_requests or load.waiting_requests else idle + 1
        await asyncio.sleep(_REST_POLL_S)
