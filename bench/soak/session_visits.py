"""Editors: somebody types, asks after each key, and leaves in one of several ways."""

from __future__ import annotations

import asyncio

from bench.soak.grpc_visits import LEFT, OK, refused
from bench.soak.place import Place
from bench.soak.soak_fault import SoakFault
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2
from specdec.client import CallError
from specdec.client.session_call import SessionCall

_URI = "soak.py"
_KEYS = 12
_PREFIX_CHARACTERS, _SUFFIX_CHARACTERS = 1200, 300


async def typing(place: Place) -> str:
    """Types to the end and waits for every answer; each ask must have just one."""
    open_asks: set[int] = set()
    try:
        async with place.client.completion.session() as session:
            reading = asyncio.create_task(_read(session, open_asks))
            try:
                await _type(place, session, open_asks, _KEYS)
                await session.done()
                await reading
            finally:
                reading.cancel()
                await asyncio.wait([reading])
    except CallError as error:
        return refused(error)
    if open_asks:
        raise SoakFault(f"a session ended with {len(open_asks)} asks unanswered")
    return OK


async def typing_and_gone(place: Place) -> str:
    """Types, and is gone in the middle of an answer."""
    try:
        async with place.client.completion.session() as session:
            await _type(place, session, set(), place.random.randrange(_KEYS))
            await asyncio.sleep(place.random.choice((0.0, 0.05, 0.5)))
    except CallError as error:
        return refused(error)
    return LEFT


async def _type(place: Place, session: SessionCall, open_asks: set[int], keys: int) -> None:
    draw = place.random
    at = draw.randrange(_PREFIX_CHARACTERS, len(place.text) - _SUFFIX_CHARACTERS - _KEYS)
    before, typed = place.text[at - draw.randrange(100, _PREFIX_CHARACTERS) : at], place.text[at : at + keys]
    setup = pb.SessionSetup(
        completion=pb.CompletionOptions(mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX),
        stopping=options_pb2.StoppingOptions(max_tokens=16),
        session=options_pb2.SessionOptions(id=f"editor-{place.number}-{draw.randrange(2)}"),
    )  # fmt: skip
    text = pb.DocumentText(
        uri=_URI, version=1, text=before + place.text[at + keys : at + keys + _SUFFIX_CHARACTERS], language="python"
    )
    open_asks.add(1)
    await session.send(pb.CompleteSessionRequest(setup=setup, text=text, ask=_ask(1, len(before), 1)))
    for number, key in enumerate(typed):
        await asyncio.sleep(draw.choice((0.0, 0.05, 0.2)))
        end = len(before) + number
        edit = pb.TextEdit(start=end, end=end, text=key)
        edits = pb.DocumentEdits(uri=_URI, from_version=number + 1, version=number + 2, edits=[edit])
        open_asks.add(number + 2)
        await session.send(pb.CompleteSessionRequest(edits=edits, ask=_ask(number + 2, end + 1, number + 2)))


def _ask(number: int, offset: int, version: int) -> pb.CompletionAsk:
    return pb.CompletionAsk(id=number, cursor=pb.Cursor(uri=_URI, version=version, offset=offset))


async def _read(session: SessionCall, open_asks: set[int]) -> None:
    async for message in session:
        which = message.WhichOneof("event")
        if which in ("finished", "refused", "resync"):
            answered = getattr(message, which).ask_id
            if answered not in open_asks:
                raise SoakFault(f"ask {answered} was answered twice, or never asked")
            open_asks.remove(answered)
