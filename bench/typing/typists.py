"""Two ways in which an editor may ask after every key: through a session, and with a request of its own each time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Protocol

from bench.typing.keys_log import KeysLog
from bench.typing.stretch import Stretch
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.client import Client, CompletionHints, Fim
from specdec.client.session_call import SessionCall
from specdec.types import Delta, Finished, StoppingParams

_URI, _LANGUAGE = "typed.py", "python"
_HINTS = CompletionHints(mode="middle_or_prefix")
_SETTLE_S = 60.0


class Typist(Protocol):
    """Types ``stretch`` at ``keys_per_s`` and asks after each key, after one ask that warms the server up."""

    async def type(self, client: Client, stretch: Stretch, keys_per_s: float, max_tokens: int, salt: str) -> KeysLog:
        """What happened; ``salt`` keeps it from finding what others left in the server.

        Raises:
            CallError: the server failed.
        """


class SessionTypist:
    """One CompleteSession stream: a key is an edit of one character and an ask."""

    async def type(self, client: Client, stretch: Stretch, keys_per_s: float, max_tokens: int, salt: str) -> KeysLog:
        """As `Typist`."""
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
            reading = asyncio.create_task(_hear(session, log, done, len(stretch.typed) + 1))
            try:
                await _first(done, reading)
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


class RequestTypist:
    """No session: every key is a Complete call with both texts, and cancels the one before, as editors do."""

    async def type(self, client: Client, stretch: Stretch, keys_per_s: float, max_tokens: int, salt: str) -> KeysLog:
        """As `Typist`."""
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


async def _hear(session: SessionCall, log: KeysLog, warm: asyncio.Event, last: int) -> None:
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
