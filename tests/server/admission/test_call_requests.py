"""The requests of one call: which wait for others of the call, and what ends all of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import cast

import pytest

from server.admission import Admission, run_requests
from server.observe.observer import Observer
from server.request_stream import RequestStream, UnreadEvents
from specdec.core.types import (
    Delta,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationStats,
    Timings,
    Usage,
)
from specdec.errors import QueueFullError

REQUESTS = [Request(str(number), (1,), SamplingParams(n=2)) for number in range(5)]


class Stream(RequestStream):
    """Ends with an error that is no refusal, if it is number ``broken``."""

    broken = ""

    async def __anext__(self) -> RequestEvent:
        if self.request.request_id == self.broken:
            raise ValueError("broken")
        return await super().__anext__()


class Doors:
    """Admits so many requests at once and answers each. ``full``: those that the engine's queue has no room for, once
    each."""

    def __init__(self, places: int, full: tuple[str, ...] = (), broken: str = "") -> None:
        self.places, self._full, self._broken = places, list(full), broken
        self.streams: list[Stream] = []
        self.most, self.answers = 0, True
        self.asked: list[tuple[str, bool]] = []  # each request, and whether the call would ask again for it

    def admit(self, caller: object, request: Request, key: str = "", *, asks_again: bool) -> RequestStream:
        self.asked.append((request.request_id, asks_again))
        if len(self.open) >= self.places:
            raise QueueFullError(self.places, 1.0)
        stream = Stream(request, lambda complete: None, Observer().request(request), UnreadEvents())
        stream.broken = self._broken
        self.streams.append(stream)
        self.most = max(self.most, len(self.open))
        if self.answers:
            asyncio.get_running_loop().call_soon(self._answer, stream)
        return stream

    @property
    def open(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.samples_left]

    def _answer(self, stream: Stream) -> None:
        name = stream.request.request_id
        if name in self._full:
            self._full.remove(name)
            stream.fail(QueueFullError(1, 1.0))
        elif name != self._broken:
            for index in range(2):
                stream.push(Delta(name, index, [1], name))
                stream.push(
                    Finished(name, index, FinishReason.LENGTH, None, Usage(1), SpeculationStats(), Timings())
                )  # fmt: skip


async def run(doors: Doors, most: int | None = None) -> list[RequestEvent]:
    async with asyncio.timeout(20), aclosing(run_requests(cast(Admission, doors), REQUESTS, most=most)) as events:
        return [event async for event in events]


@pytest.mark.parametrize(
    ("places", "most", "full", "at_once"),
    [(9, None, (), 5), (9, 3, (), 3), (2, None, (), 2), (1, 4, (), 1), (9, None, ("2", "4"), 5)],
)
async def test_requests_without_room_wait_for_others_of_the_call(
    places: int, most: int | None, full: tuple[str, ...], at_once: int
) -> None:
    doors = Doors(places, full)
    found = await run(doors, most)
    assert sorted(event.index for event in found if isinstance(event, Finished)) == [*range(10)]
    texts = [(event.index // 2, event.text) for event in found if isinstance(event, Delta)]
    assert sorted(texts) == [(number, str(number)) for number in range(5) for _ in range(2)]
    assert (doors.most, len(doors.streams)) == (at_once, 5 + len(full))


@pytest.mark.parametrize("doors", [Doors(0), Doors(9, ("0",)), Doors(9, ("0", "1", "2", "3", "4"))])
async def test_a_call_whose_first_request_finds_no_room_is_refused(doors: Doors) -> None:
    with pytest.raises(QueueFullError):
        await run(doors)
    assert not doors.open


async def test_a_request_is_refused_if_no_other_of_the_call_runs() -> None:
    doors = Doors(1)
    async with aclosing(run_requests(cast(Admission, doors), REQUESTS)) as events:
        await anext(events)
        doors.places = 0  # another caller has taken the place
        with pytest.raises(QueueFullError):
            _ = [event async for event in events]


async def test_a_request_that_is_to_be_asked_again_is_so_if_the_others_have_ended_meanwhile() -> None:
    doors = Doors(9)
    doors.answers = False
    async with asyncio.timeout(20), aclosing(run_requests(cast(Admission, doors), REQUESTS[:2])) as events:
        asking = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # both are admitted
        doors._answer(doors.streams[0])
        seen = [await asking, *[await anext(events) for _ in range(3)]]  # all events of the first
        doors.streams[1].fail(QueueFullError(1, 1.0))
        doors.answers = True
        seen += [event async for event in events]
    assert [event.request_id for event in seen] == ["0"] * 4 + ["1"] * 4
    assert doors.asked == [("0", False), ("1", True), ("1", False)]


async def test_any_error_ends_the_call_and_its_other_requests() -> None:
    doors = Doors(9, broken="3")
    with pytest.raises(ValueError, match="broken"):
        await run(doors)
    assert not doors.open


async def test_leaving_aborts_every_request() -> None:
    doors = Doors(9)
    doors.answers = False
    async with aclosing(run_requests(cast(Admission, doors), REQUESTS)) as events:
        asking = asyncio.create_task(anext(events))
        await asyncio.sleep(0)  # all are admitted
        assert len(doors.open) == 5
        asking.cancel()
        await asyncio.wait([asking])
    assert not doors.open
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
