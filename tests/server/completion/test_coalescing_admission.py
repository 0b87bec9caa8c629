"""Coalesced requests are admitted like any other, and each reader's end is its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.admission import Admission
from server.auth.principal import Limits
from server.completion.coalescing import CoalescedRequest, RequestCoalescer
from server.errors import DeadlinePassedError, RateLimitedError, TokenQueueFullError
from server.request_stream import RequestStream
from specdec.config import ServerConfig
from specdec.core.types import MAX_QUEUED_REQUESTS, Delta, Finished, FinishReason, Request, SamplingParams
from specdec.errors import DuplicateRequestError, QueueFullError
from tests.server.admission.stub_engine import StubClient, delta, finished, principal, started

CALLER = principal()
GREEDY = Request("first", tuple(range(100)), sampling=SamplingParams(temperature=0.0))
SAMPLED = replace(GREEDY, sampling=SamplingParams())
KINDS = pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["equal answer", "equal prompt"])
SOON_S = 0.01


class HoldingClient(StubClient):
    """Holds requests as `EngineClient` does."""

    def generate(self, request: Request, *, hold: bool = False) -> RequestStream:
        stream = super().generate(request, hold=hold)
        if hold:
            self.given.remove(request)
        return stream

    def release(self, stream: RequestStream) -> None:
        self.given.append(stream.request)


def table_over(
    client: StubClient, requests: int = MAX_QUEUED_REQUESTS, **config: Any
) -> tuple[RequestCoalescer, Admission]:
    doors = Admission(client, ServerConfig(**config), max_queued_requests=requests)
    return RequestCoalescer(doors), doors


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def outcome(run: CoalescedRequest) -> tuple[int, FinishReason]:
    """Tokens and finish reason."""
    events = [event async for event in run.read()]
    end = events[-1]
    assert isinstance(end, Finished)
    return sum(len(event.token_ids) for event in events if isinstance(event, Delta)), end.reason


@KINDS
@pytest.mark.parametrize(
    ("limits", "requests", "config", "error"),
    [
        ({"max_concurrent": 1}, MAX_QUEUED_REQUESTS, {}, RateLimitedError),
        ({"requests_per_minute": 1}, MAX_QUEUED_REQUESTS, {}, RateLimitedError),
        ({"tokens_per_minute": 50}, MAX_QUEUED_REQUESTS, {}, RateLimitedError),
        ({}, MAX_QUEUED_REQUESTS, {"max_queued_tokens": 150}, TokenQueueFullError),
        ({}, 1, {}, QueueFullError),
    ],
    ids=["concurrent", "request rate", "token rate", "queued tokens", "queued requests"],
)
async def test_limits_hold(
    request_: Request, limits: dict[str, Any], requests: int, config: dict[str, int], error: type[Exception]
) -> None:
    table, doors = table_over(HoldingClient(), requests, **config)
    caller = principal(**limits)
    first, _ = await table.start(caller, request_)
    with pytest.raises(error):
        await table.start(caller, replace(request_, request_id="second"))
    first.leave()
    assert doors.in_flight == 0


@KINDS
async def test_an_id_in_flight_is_rejected(request_: Request) -> None:
    table, _ = table_over(HoldingClient())
    await table.start(CALLER, request_)
    with pytest.raises(DuplicateRequestError):
        await table.start(CALLER, request_)


async def test_a_joiners_tokens_are_charged_to_its_key() -> None:
    client = HoldingClient()
    table, doors = table_over(client)
    limited = principal("limited", tokens_per_minute=1000)
    first, _ = await table.start(CALLER, GREEDY)
    joined, _ = await table.start(limited, replace(GREEDY, request_id="second"))
    client.say(started(client.given[0]))
    client.say(delta(client.given[0], 900))
    client.say(finished(client.given[0], 900))
    assert await outcome(joined) == await outcome(first) == (900, FinishReason.EOS)
    with pytest.raises(RateLimitedError):
        doors.check_rate(limited)
    assert doors.in_flight == 0


async def test_a_joiner_occupies_no_batch_slot_and_releases_its_concurrency() -> None:
    client = HoldingClient(max_batch=2)
    table, doors = table_over(client)
    limited = principal("limited", max_concurrent=1)
    first, _ = await table.start(CALLER, GREEDY)
    client.say(started(client.given[0]))
    await settle()
    for name in "abc":
        joined, shared = await table.start(limited, replace(GREEDY, request_id=name))
        await settle()
        assert (shared, doors.waiting, doors.forecast_s) == (True, 0, 0.0)
        joined.leave()
    first.leave()
    assert (doors.in_flight, client.in_flight, table.in_flight) == (0, 0, 0)


@KINDS
@pytest.mark.parametrize("priority", [-1, 0, 1])
async def test_only_requests_of_higher_priority_are_not_coalesced(request_: Request, priority: int) -> None:
    client = HoldingClient()
    table, _ = table_over(client)
    await table.start(CALLER, request_)
    task = asyncio.create_task(table.start(CALLER, replace(request_, request_id="second", priority=priority)))
    await settle()
    assert [given.priority for given in client.given] == ([0, 1] if priority > 0 else [0])
    task.cancel()


@KINDS
async def test_a_priority_above_the_keys_limit_is_ignored(request_: Request) -> None:
    client = HoldingClient()
    table, _ = table_over(client)
    caller = replace(CALLER, limits=Limits(max_priority=0))
    await table.start(caller, request_)
    task = asyncio.create_task(table.start(caller, replace(request_, request_id="second", priority=10)))
    await settle()
    assert len(client.given) == 1
    task.cancel()


@KINDS
@pytest.mark.parametrize("scheduled", [False, True])
async def test_a_nearer_deadline_is_not_coalesced_while_the_twin_is_not_scheduled(
    request_: Request, scheduled: bool
) -> None:
    client = HoldingClient()
    table, _ = table_over(client)
    await table.start(CALLER, request_)
    if scheduled:
        client.say(started(client.given[0]))
        await settle()
    task = asyncio.create_task(table.start(CALLER, replace(request_, request_id="second", deadline_s=60.0)))
    await settle()
    assert len(client.given) == (1 if scheduled else 2)
    task.cancel()


async def test_a_deadline_ends_its_own_reader_only() -> None:
    request_ = GREEDY
    client = HoldingClient()
    table, doors = table_over(client)
    first, _ = await table.start(CALLER, request_)
    client.say(started(client.given[0]))
    await settle()
    late, _ = await table.start(CALLER, replace(request_, request_id="late", deadline_s=SOON_S))
    with pytest.raises(DeadlinePassedError):
        await outcome(late)
    client.say(delta(client.given[0], 3))
    client.say(finished(client.given[0], 3))
    assert await outcome(first) == (3, FinishReason.EOS)
    assert (len(client.given), client.aborted, doors.in_flight) == (1, [], 0)


async def test_a_held_request_past_its_deadline_is_ended_by_the_engine() -> None:
    client = HoldingClient()
    table, doors = table_over(client)
    first, _ = await table.start(CALLER, SAMPLED)
    client.say(started(client.given[0]))
    await settle()
    held, _ = await table.start(CALLER, replace(SAMPLED, request_id="held", deadline_s=SOON_S))
    assert (len(client.given), doors.waiting) == (1, 1)
    while len(client.given) == 1:
        await asyncio.sleep(0)
    client.say(finished(client.given[1], 0, FinishReason.DEADLINE))
    with pytest.raises(DeadlinePassedError):
        await outcome(held)
    first.leave()
    assert doors.in_flight == 0


@pytest.mark.parametrize("aborted", ["first", "second"])
async def test_an_abort_leaves_the_whole_answer_to_the_other_readers(aborted: str) -> None:
    client = HoldingClient()
    table, doors = table_over(client)
    runs = {name: (await table.start(CALLER, replace(GREEDY, request_id=name)))[0] for name in ("first", "second")}
    client.say(started(client.given[0]))
    client.say(delta(client.given[0], 2))
    await settle()
    assert doors.abort(CALLER, aborted)
    ended = runs.pop(aborted)
    assert await outcome(ended) == (2, FinishReason.ABORTED)
    ended.leave()
    assert not doors.abort(CALLER, aborted)  # it has ended; its id must not reach the others
    client.say(delta(client.given[0], 3))
    client.say(finished(client.given[0], 5))
    (other,) = runs.values()
    assert await outcome(other) == (5, FinishReason.EOS)
    assert (len(client.given), client.aborted, doors.in_flight) == (1, [], 0)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
async def test_the_engine_stops_when_all_readers_abort(order: tuple[str, str]) -> None:
    client = HoldingClient()
    table, doors = table_over(client)
    runs = {name: (await table.start(CALLER, replace(GREEDY, request_id=name)))[0] for name in ("first", "second")}
    for name in order:
        assert doors.abort(CALLER, name)
        assert await outcome(runs[name]) == (0, FinishReason.ABORTED)
    assert len(client.aborted) == 1
    assert (client.in_flight, table.in_flight, doors.in_flight) == (0, 0, 0)
