"""Which requests are admitted, which are rejected with which retry delay, and that every resource is released."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.admission import LATE_MARGIN, Admission, KeyUsage
from server.auth.principal import ANYBODY, Limits, Principal
from server.errors import DeadlinePassedError, LateError, RateLimitedError, SupersededError, TokenQueueFullError
from server.http.errors import refusal_of
from specdec.config import ServerConfig
from specdec.core.types import (
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    ResumeParams,
    SamplingParams,
    StoppingParams,
)
from specdec.errors import DuplicateRequestError, EngineDeadError, QueueFullError
from tests.server.admission.stub_engine import Clock, StubClient, admission, delta, finished, principal, started

PROMPT = tuple(range(10))


def make_request(request_id: str = "r", **values: Any) -> Request:
    return Request(request_id, values.pop("prompt", PROMPT), **values)


async def rest_of(stream: Any) -> list[RequestEvent]:
    return [event async for event in stream]


async def test_the_engine_gets_tenant_scoped_names_and_the_reader_the_callers() -> None:
    client = StubClient()
    doors = admission(client)
    async with doors.admit(principal(max_priority=2), make_request("x", cache_salt="s", priority=9)) as stream:
        (given,) = client.given
        assert (given.request_id, given.cache_salt, given.priority) == ("t/x", "t/s", 2)
        for event in (started(given), delta(given, 3), finished(given, 3)):
            client.say(event)
        assert [event.request_id for event in await rest_of(stream)] == ["x"] * 3
    assert (doors.in_flight, client.in_flight, client.aborted) == (0, 0, [])
    async with doors.admit(ANYBODY, make_request("x", cache_salt="s", priority=9)):
        assert client.given[-1] == make_request("x", cache_salt="s", priority=9)
    assert client.aborted == ["x"]  # it was left before its end


async def test_tenants_share_no_ids_aborts_or_keys() -> None:
    client = StubClient()
    doors = admission(client)
    mine, theirs = principal("a", "one"), principal("b", "two")
    first, second = doors.admit(mine, make_request("same"), "doc"), doors.admit(theirs, make_request("same"), "doc")
    with pytest.raises(DuplicateRequestError):
        doors.admit(mine, make_request("same"))
    assert doors.in_flight == 2  # neither superseded the other
    assert not doors.abort(theirs, "one/same")
    assert doors.abort(theirs, "same")
    assert client.aborted == ["two/same"]
    first.close()
    second.close()
    assert (doors.in_flight, client.in_flight) == (0, 0)


async def test_requests_per_minute() -> None:
    clock, client = Clock(), StubClient()
    doors, who = admission(client, clock), principal(requests_per_minute=2)
    for i in range(2):
        doors.admit(who, make_request(f"r{i}")).close()
    with pytest.raises(RateLimitedError) as caught:
        doors.admit(who, make_request())
    error = caught.value
    assert (error.limit, error.value, error.retry_after_s) == ("requests_per_minute", 2, pytest.approx(30))
    assert len(client.given) == 2
    doors.admit(principal("other"), make_request()).close()  # another key of the same tenant is not concerned
    clock.now += 29
    with pytest.raises(RateLimitedError):
        doors.admit(who, make_request())
    clock.now += 1.01
    doors.admit(who, make_request()).close()


def test_of_two_limits_that_are_used_up_requests_are_named() -> None:
    usage = KeyUsage("key")
    for limits in (
        Limits(tokens_per_minute=1),
        Limits(tokens_per_minute=1, requests_per_minute=1),
    ):  # added by a reload
        usage.apply(limits, 0.0)
    usage.begin(5, 0.0)
    with pytest.raises(RateLimitedError) as caught:
        usage.check_rate(0.0)
    assert caught.value.limit == "requests_per_minute"


async def test_tokens_per_minute_count_prompt_and_output() -> None:
    clock, client = Clock(), StubClient()
    doors, who = admission(client, clock), principal(tokens_per_minute=60)
    async with doors.admit(who, make_request()) as stream:
        (given,) = client.given
        for event in (started(given), delta(given, 45), delta(given, 25), finished(given, 70)):
            client.say(event)
        await rest_of(stream)
    with pytest.raises(RateLimitedError) as caught:  # 10 + 70 of 60
        doors.admit(who, make_request())
    assert (caught.value.limit, caught.value.retry_after_s) == ("tokens_per_minute", pytest.approx(21))
    clock.now += 21.01
    doors.admit(who, make_request(prompt=tuple(range(1000)))).close()  # of any size, once the limit is not used up
    assert client.aborted  # it was never begun, so its prompt does not count
    doors.admit(who, make_request()).close()


async def test_concurrent_requests_of_a_key() -> None:
    client = StubClient()
    doors, who = admission(client), principal(max_concurrent=2)
    first = doors.admit(who, make_request("1"), "doc")
    second = doors.admit(who, make_request("2"))
    with pytest.raises(RateLimitedError) as caught:
        doors.admit(who, make_request("3"))
    assert caught.value.limit == "max_concurrent"
    assert caught.value.retry_after_s > 0
    third = doors.admit(who, make_request("3"), "doc")  # takes the first one's place
    with pytest.raises(RateLimitedError):
        doors.admit(who, make_request("4"))
    first.close()  # superseded before: its slot was already released
    with pytest.raises(RateLimitedError):
        doors.admit(who, make_request("4"))
    client.say(finished(client.given[1], 1))
    await rest_of(second)
    fourth = doors.admit(who, make_request("4"))
    for stream in (third, fourth):
        stream.close()
    assert doors.in_flight == 0


async def test_superseding_a_request_of_another_key_takes_no_place_of_ones_own() -> None:
    doors, who = admission(StubClient()), principal("a", max_concurrent=1)
    doors.admit(who, make_request("1"))
    doors.admit(principal("b"), make_request("2"), "doc")  # of the same tenant
    with pytest.raises(RateLimitedError):
        doors.admit(who, make_request("3"), "doc")
    assert doors.in_flight == 2


async def test_an_answer_that_is_complete_but_not_read_holds_no_place_of_its_key() -> None:
    client = StubClient()
    doors, who = admission(client), principal(max_concurrent=1)
    unread = doors.admit(who, make_request("1"))
    for event in (started(client.given[0]), delta(client.given[0], 3), finished(client.given[0], 3)):
        client.say(event)
    doors.admit(who, make_request("2")).close()
    assert len(await rest_of(unread)) == 3


async def test_limits_follow_the_key_file() -> None:
    clock, client = Clock(), StubClient()
    doors = admission(client, clock)
    for i in range(5):
        doors.admit(principal(), make_request(f"r{i}")).close()
    doors.admit(principal(requests_per_minute=1), make_request()).close()
    with pytest.raises(RateLimitedError):
        doors.admit(principal(requests_per_minute=1), make_request())
    doors.admit(principal(), make_request()).close()
    unread = doors.admit(principal(), make_request())
    with pytest.raises(RateLimitedError):
        doors.admit(principal(max_concurrent=1), make_request("s"))
    unread.close()


async def test_a_newer_request_supersedes_the_older_one() -> None:
    client = StubClient()
    doors, who = admission(client), principal()
    older = doors.admit(who, make_request("old", sampling=SamplingParams(n=2)), "doc")
    client.say(started(client.given[0]))
    client.say(delta(client.given[0], 2))
    newer = doors.admit(who, make_request("new"), "doc")
    assert client.aborted == ["t/old"]
    seen: list[RequestEvent] = []
    with pytest.raises(SupersededError):  # noqa: PT012 - what came before the error matters
        async for event in older:
            seen.append(event)  # noqa: PERF401
    assert [type(event).__name__ for event in seen] == ["Started", "Delta", "Finished", "Finished"]
    assert {e.reason for e in seen if isinstance(e, Finished)} == {FinishReason.ABORTED}
    assert doors.in_flight == 1
    client.say(finished(client.given[1], 0))
    assert len(await rest_of(newer)) == 1
    assert doors.in_flight == client.in_flight == 0
    doors.admit(who, make_request("third"), "doc").close()
    assert client.aborted == ["t/old", "t/third"]  # a finished request cannot be superseded


async def test_the_late_end_of_a_superseded_request_leaves_the_key_to_the_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = StubClient()
    monkeypatch.setattr(client, "abort", client._table.abort)  # the engine answers later
    doors, who = admission(client), principal()
    doors.admit(who, make_request("old"), "doc")
    doors.admit(who, make_request("new"), "doc")
    assert doors.in_flight == 1
    client.say(finished(client.given[0], 0, FinishReason.ABORTED))
    doors.admit(who, make_request("third"), "doc").close()
    assert client.aborted[:2] == ["t/old", "t/new"]


async def test_a_completed_request_is_not_superseded() -> None:
    client = StubClient()
    doors, who = admission(client), principal()
    older = doors.admit(who, make_request("old"), "doc")
    client.say(finished(client.given[0], 4))
    newer = doors.admit(who, make_request("new"), "doc")
    (end,) = await rest_of(older)
    assert isinstance(end, Finished)
    assert end.reason == FinishReason.EOS
    newer.close()


async def test_a_request_that_completes_before_it_is_aborted_is_complete() -> None:
    client = StubClient()
    client.abort = lambda request_id: True  # type: ignore[method-assign] # on its way; the engine is quicker
    doors, who = admission(client), principal()
    older = doors.admit(who, make_request("old"), "doc")
    newer = doors.admit(who, make_request("new"), "doc")
    client.say(finished(client.given[0], 4))
    assert len(await rest_of(older)) == 1
    newer.close()


async def test_a_rejected_request_supersedes_nothing() -> None:
    client = StubClient()
    doors, who = admission(client), principal(requests_per_minute=1)
    older = doors.admit(who, make_request("old"), "doc")
    with pytest.raises(RateLimitedError):
        doors.admit(who, make_request("new"), "doc")
    client.dead = True
    with pytest.raises(EngineDeadError):
        doors.admit(principal("b"), make_request("new"), "doc")
    client.dead = False
    with pytest.raises(DuplicateRequestError):
        doors.admit(principal("b"), make_request("old"), "doc")
    assert (client.aborted, doors.in_flight) == ([], 1)
    older.close()


async def test_the_queue_is_bounded_in_tokens() -> None:
    client = StubClient()
    doors, who = admission(client, max_queued_tokens=25), principal()
    first = doors.admit(who, make_request("1", prompt=tuple(range(40))))  # alone, any length may wait
    with pytest.raises(TokenQueueFullError) as caught:
        doors.admit(who, make_request("2"))
    error = caught.value
    assert isinstance(error, QueueFullError)
    assert (error.limit, error.reason) == (25, "QUEUE_FULL")
    assert error.retry_after_s > 0
    assert "40 prompt tokens wait" in str(error)
    client.say(started(client.given[0]))
    await anext(first)  # the engine has it: it does not wait any more
    others = [doors.admit(who, make_request(str(i))) for i in (2, 3)]
    assert doors.waiting_tokens == 20
    with pytest.raises(TokenQueueFullError):
        doors.admit(who, make_request("4"))
    for stream in (first, *others):
        stream.close()
    unlimited = admission(client, max_queued_tokens=0)
    streams = [unlimited.admit(who, make_request(str(i), prompt=tuple(range(100)))) for i in range(9)]
    for stream in streams:
        stream.close()


async def test_a_request_takes_the_room_of_the_one_that_it_supersedes_on_the_same_model_only() -> None:
    prompt, config = tuple(range(20)), ServerConfig(max_queued_tokens=25)
    doors = Admission(cast(Any, StubClient()), config, Clock())
    beside = Admission(cast(Any, StubClient()), config, Clock(), beside=doors)
    for number in "12":
        doors.admit(ANYBODY, make_request(number, prompt=prompt), "doc")
    beside.admit(ANYBODY, make_request("3"))
    with pytest.raises(TokenQueueFullError):
        beside.admit(ANYBODY, make_request("4", prompt=prompt), "doc")
    assert (doors.in_flight, beside.in_flight) == (1, 1)


async def test_retry_after_estimates_the_length_of_the_queue() -> None:
    """Without measurements, a request that has waited for long will wait for as long again."""
    clock, client = Clock(), StubClient()
    doors = admission(client, clock, max_queued_tokens=25)
    first = doors.admit(ANYBODY, make_request("1", prompt=tuple(range(40))))
    for waited, expected in ((0.0, 1.0), (22.0, 22.0)):
        clock.now += waited
        with pytest.raises(TokenQueueFullError) as caught:
            doors.admit(ANYBODY, make_request("2"))
        assert caught.value.retry_after_s == expected
    first.close()
    await finish_some(doors := admission(client, clock), client, clock)
    waiting = doors.admit(ANYBODY, make_request("3", prompt=tuple(range(2000))))  # 10 ms a token
    refused = doors.admit(ANYBODY, make_request("4"))
    client.refuse("4", QueueFullError(1, 1.0))  # only the engine knows how often one ends
    with pytest.raises(QueueFullError, match=r"queue is full \(1 requests\); retry in 20\.0 s") as told:
        await rest_of(refused)
    assert told.value.retry_after_s == pytest.approx(20.0)
    waiting.close()


async def test_a_deadline_missed_in_the_queue_has_a_retry_hint() -> None:
    clock, client = Clock(), StubClient()
    doors = admission(client, clock)
    first, late = doors.admit(ANYBODY, make_request("1")), doors.admit(ANYBODY, make_request("2", deadline_s=3.0))
    clock.now += 3.0
    client.say(finished(client.given[1], 0, FinishReason.DEADLINE))
    with pytest.raises(DeadlinePassedError) as passed:
        await rest_of(late)
    assert dict(refusal_of(passed.value, {}).headers)[b"retry-after"] == b"3"
    assert doors.in_flight == 1
    begun = doors.admit(ANYBODY, make_request("3", deadline_s=3.0))
    for event in (started(client.given[2]), finished(client.given[2], 1, FinishReason.DEADLINE)):
        client.say(event)
    with pytest.raises(DeadlinePassedError) as passed:
        await rest_of(begun)
    assert passed.value.retry_after_s is None
    first.close()


async def test_a_missed_deadline_of_many_samples_is_forecast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client, forecasts = StubClient(), Mock(return_value=7.0)
    doors = admission(client)
    late = doors.admit(ANYBODY, make_request("late", sampling=SamplingParams(n=3), deadline_s=3.0))
    monkeypatch.setattr(doors, "wait_s", forecasts)
    for index in range(3):
        client.say(finished(client.given[0], 0, FinishReason.DEADLINE, index))
    with pytest.raises(DeadlinePassedError) as passed:
        await rest_of(late)
    assert (passed.value.retry_after_s, forecasts.call_count) == (7.0, 1)


async def test_a_request_rejected_by_the_engine_releases_everything_and_costs_no_tokens() -> None:
    client = StubClient()
    doors, who = admission(client), principal(tokens_per_minute=5)
    stream = doors.admit(who, make_request())
    client.refuse("t/r", QueueFullError(3, 1.5))
    with pytest.raises(QueueFullError) as refused:
        await rest_of(stream)
    assert refused.value.retry_after_s == 1.5  # the engine's own, as the forecast is shorter
    assert (doors.in_flight, doors.waiting_tokens) == (0, 0)
    doors.admit(who, make_request()).close()


async def finish_some(doors: Any, client: StubClient, clock: Clock, count: int = 6) -> None:
    """The engine takes 10 ms per prompt token and 100 ms per output token, answers have 21 tokens; one a second."""
    for i in range(count):
        async with doors.admit(ANYBODY, make_request(f"past{i}", prompt=tuple(range(100)))) as stream:
            given = client.given[-1]
            client.say(started(given))
            clock.now += 1.0
            client.say(finished(given, 21, prefill_ms=1000.0, decode_ms=2000.0))
            await rest_of(stream)


async def test_a_request_that_cannot_meet_its_deadline_is_not_started() -> None:
    clock, client = Clock(), StubClient(max_batch=2)
    doors = admission(client, clock)
    await finish_some(doors, client, clock)
    busy = [doors.admit(ANYBODY, make_request(f"busy{i}")) for i in range(2)]
    for request, stream in zip(client.given[-2:], busy, strict=True):
        client.say(started(request))
        await anext(stream)
    # One place is missing (1 s), its prompt takes 0.1 s and 20 tokens after the first 2 s.
    with pytest.raises(LateError) as caught:
        doors.admit(ANYBODY, make_request("late", deadline_s=3.0))
    error = caught.value
    assert (error.needed_s, error.deadline_s) == (pytest.approx(3.1 * LATE_MARGIN), 3.0)
    assert error.retry_after_s == pytest.approx(3.1 * LATE_MARGIN - 3.0)
    assert not any(request.request_id == "late" for request in client.given)
    for fine in (
        make_request("time", deadline_s=3.1 * LATE_MARGIN + 0.01),
        make_request("none"),
        make_request("short", deadline_s=1.1 * LATE_MARGIN + 0.01, stopping=StoppingParams(max_tokens=1)),
        make_request("urgent", deadline_s=3.1 * LATE_MARGIN + 0.01, priority=1),
    ):
        doors.admit(ANYBODY, fine).close()
    with pytest.raises(LateError):  # the request asks for this many tokens, whatever other requests used
        doors.admit(
            ANYBODY, make_request("long", deadline_s=5, stopping=StoppingParams(max_tokens=60, ignore_eos=True))
        )
    with pytest.raises(LateError):
        doors.admit(ANYBODY, make_request("prompt", deadline_s=5, prompt=tuple(range(500))))
    waiting = [doors.admit(ANYBODY, make_request(f"waits{i}")) for i in range(3)]
    with pytest.raises(LateError) as caught:
        doors.admit(ANYBODY, make_request("late", deadline_s=4.0))
    assert caught.value.needed_s == pytest.approx(6.1 * LATE_MARGIN)
    doors.admit(
        ANYBODY, make_request("first", deadline_s=4.0, priority=1)
    ).close()  # is scheduled before those that wait
    for stream in (*busy, *waiting):
        stream.close()


async def test_long_prompts_that_wait_delay_a_short_one_by_its_own_length_each() -> None:
    clock, client = Clock(), StubClient(max_batch=8)
    doors = admission(client, clock)
    await finish_some(doors, client, clock)
    waiting = [doors.admit(ANYBODY, make_request(f"waits{i}", prompt=tuple(range(500)))) for i in range(2)]
    one, needed_s = StoppingParams(max_tokens=1), 3 * 0.1  # a prompt of 10 tokens takes 0.1 s
    request = make_request("short", deadline_s=needed_s * LATE_MARGIN + 0.01, prompt=tuple(range(10)), stopping=one)
    doors.admit(ANYBODY, request).close()
    with pytest.raises(LateError) as caught:
        doors.admit(ANYBODY, make_request("long", deadline_s=14.0, prompt=tuple(range(500)), stopping=one))
    assert caught.value.needed_s == pytest.approx(3 * 5.0 * LATE_MARGIN)
    assert [doors.forecast_s(tokens) for tokens in (10, 500, math.inf)] == pytest.approx([0.2, 10.0, 10.0])
    for stream in waiting:
        stream.close()


async def test_generated_answers_that_are_not_read_occupy_no_slot() -> None:
    clock, client = Clock(), StubClient(max_batch=2)
    doors = admission(client, clock)
    await finish_some(doors, client, clock)
    slow = [doors.admit(ANYBODY, make_request(f"slow{i}", sampling=SamplingParams(n=2))) for i in range(2)]
    for request, stream in zip(client.given[-2:], slow, strict=True):
        client.say(started(request))
        await anext(stream)
        clock.now += 1.0
        client.say(finished(request, 21, decode_ms=2000.0))
    assert doors.forecast_s() == pytest.approx(1.0)  # each has another sample on its way
    with pytest.raises(LateError):
        doors.admit(ANYBODY, make_request("late", deadline_s=2.1 * LATE_MARGIN + 0.01))
    for request in client.given[-2:]:
        client.say(finished(request, 21, index=1))
    assert doors.forecast_s() == 0.0
    doors.admit(ANYBODY, make_request("fine", deadline_s=2.1 * LATE_MARGIN + 0.01)).close()
    for stream in slow:
        assert len(await rest_of(stream)) == 2


def resumed(request_id: str, count: int, **values: Any) -> Request:
    return make_request(request_id, resume=ResumeParams((7,) * count), **values)


async def test_resumed_tokens_count_like_prompt_tokens() -> None:
    client = StubClient()
    doors, who = admission(client), principal(tokens_per_minute=60)
    doors.admit(who, resumed("left", 1000)).close()  # it was never begun
    async with doors.admit(who, resumed("r", 45)) as stream:
        assert doors.waiting_tokens == 55
        given = client.given[-1]
        for event in (started(given), delta(given, 5), finished(given, 50, resumed=45)):
            client.say(event)
        await rest_of(stream)
    with pytest.raises(RateLimitedError) as caught:  # 10 + 45 + 5 of 60
        doors.admit(who, make_request("next"))
    assert caught.value.retry_after_s == pytest.approx(1)


async def test_a_resumed_request_is_forecast_by_its_remaining_tokens_and_does_not_skew_the_estimate() -> None:
    clock, client = Clock(), StubClient(max_batch=2)
    doors = admission(client, clock)
    await finish_some(doors, client, clock)
    running = doors.admit(ANYBODY, make_request("running"))
    client.say(started(client.given[-1]))
    await anext(running)

    def needed_s(request: Request) -> float:
        with pytest.raises(LateError) as caught:
            doors.admit(ANYBODY, request)
        return caught.value.needed_s / LATE_MARGIN

    # Of 25 tokens to prefill each takes 10 ms; of the 21 likely output tokens 6 remain, and the first arrives with the
    # prefill.
    assert needed_s(resumed("half", 15, deadline_s=0.1)) == pytest.approx(0.25 + 0.5)
    assert needed_s(resumed("nearly", 20, deadline_s=0.1)) == pytest.approx(0.3)
    before = needed_s(make_request("whole", deadline_s=0.1))
    async with doors.admit(ANYBODY, resumed("r", 20, prompt=tuple(range(100)))) as stream:
        given = client.given[-1]
        client.say(started(given))
        clock.now += 1.0
        client.say(finished(given, 23, prefill_ms=9000.0, decode_ms=200.0, resumed=20))
        await rest_of(stream)
    assert needed_s(make_request("whole", deadline_s=0.1)) == pytest.approx(before, rel=0.05)
    running.close()


async def test_nothing_is_shed_without_measurements_or_reason() -> None:
    clock, client = Clock(), StubClient(max_batch=1)
    doors = admission(client, clock)
    hopeless = make_request("h", deadline_s=0.001, stopping=StoppingParams(max_tokens=1000, ignore_eos=True))
    running = doors.admit(ANYBODY, make_request("running"))
    doors.admit(ANYBODY, hopeless).close()  # nothing is measured yet
    running.close()
    await finish_some(doors, client, clock)
    doors.admit(ANYBODY, hopeless).close()  # an idle engine accepts every request
    running = doors.admit(ANYBODY, make_request("running"))
    with pytest.raises(LateError):
        doors.admit(ANYBODY, hopeless)
    clock.now += 60  # a minute-old measurement
    doors.admit(ANYBODY, hopeless).close()
    running.close()


async def test_a_disconnect_at_any_moment_releases_everything() -> None:
    client = StubClient()
    doors, who = admission(client), principal(max_concurrent=1)

    async def read(stream: Any) -> None:
        async with stream:
            await rest_of(stream)

    for moment in range(3):
        task = asyncio.create_task(read(doors.admit(who, make_request(f"r{moment}"), "k")))
        await asyncio.sleep(0)
        for event in (started(client.given[-1]), delta(client.given[-1], 1))[:moment]:
            client.say(event)
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (doors.in_flight, client.in_flight, client.aborted[-1]) == (0, 0, f"t/r{moment}")


PEOPLE = [
    principal("a", "one", max_concurrent=3),
    principal("b", "one"),
    principal("c", "two", max_priority=0),
    ANYBODY,
]
MOVES = st.lists(
    st.tuples(st.sampled_from(["admit", "say", "close", "abort"]), st.integers(0, 9), st.sampled_from(["", "k", "l"])),
    max_size=60,
)


@given(moves=MOVES)
def test_accounting_is_exact_under_any_schedule(moves: list[tuple[str, int, str]]) -> None:
    asyncio.run(play(moves))


async def play(moves: list[tuple[str, int, str]]) -> None:
    client = StubClient()
    doors = admission(client)
    open_ones: list[tuple[Principal, Any, Request]] = []
    for number, (move, pick, key) in enumerate(moves):
        if move == "admit":
            who = PEOPLE[pick % len(PEOPLE)]
            try:
                stream = doors.admit(who, make_request(f"r{number}"), key)
            except RateLimitedError:
                continue
            open_ones.append((who, stream, client.given[-1]))
        elif open_ones:
            who, stream, given = open_ones[pick % len(open_ones)]
            if move == "close":
                stream.close()
            elif move == "abort":
                doors.abort(who, stream.request_id)
            elif stream.samples_left:
                client.say(finished(given, 1) if pick % 2 else delta(given, 1))
        assert doors.in_flight <= len(open_ones)
        assert {t.supersedes_key for _, t in doors._by_key.values()} == set(doors._by_key)
        keyed = [t for t in doors._streams if t.supersedes_key]
        assert sorted(t.supersedes_key for t in keyed) == sorted(doors._by_key)  # one request per key
        running = [usage._running for usage in doors._usage.values()]
        assert (min(running, default=0) >= 0, sum(running)) == (True, doors.in_flight)
        assert doors._usage["a"]._running <= 3 if "a" in doors._usage else True
    for _, stream, _ in open_ones:
        stream.close()
    assert (doors.in_flight, client.in_flight, doors._by_key) == (0, 0, {})
