"""Equal requests share a run, equal prompts are prefilled once, and the last reader to leave ends the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from server.auth.principal import ANYBODY, Principal
from server.completion import coalescing
from server.completion.coalescing import CoalescedRequest, RequestCoalescer
from server.errors import RateLimitedError
from server.request_stream import weight_of
from specdec.core.types import (
    Delta,
    Finished,
    GrammarKind,
    GrammarParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.errors import EngineDeadError
from tests.server.admission.stub_engine import StubClient, admission, principal
from tests.server.completion.scripted_engine import ScriptedEngine

GREEDY = Request("a", tuple(range(100)), sampling=SamplingParams(temperature=0.0))
CHANCE = replace(GREEDY, sampling=SamplingParams())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def read(run: CoalescedRequest) -> str:
    return "".join([event.text async for event in run.read() if isinstance(event, Delta)])


async def test_equal_requests_are_coalesced() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    run, shared = await table.start(ANYBODY, GREEDY)
    engine.last.say("one ")
    await settle()
    same = replace(
        GREEDY, request_id="b", priority=-3, session="s", prediction_ids=(1,), target_tpot_ms=5.0,
        speculation=SpeculationParams(SpeculationMode.OFF),
    )  # fmt: skip
    later, joined = await table.start(ANYBODY, same)
    assert (shared, joined, len(engine.requests)) == (False, True, 1)
    run.leave()
    assert engine.running == 1
    engine.last.say("two")
    engine.last.finish()
    assert await read(later) == "one two"
    later.leave()
    again, joined = await table.start(ANYBODY, GREEDY)  # a finished run is not kept
    assert (joined, len(engine.requests)) == (False, 2)
    again.leave()
    assert (engine.running, table.in_flight) == (0, 0)


OTHERS = {
    "prompt": replace(GREEDY, prompt_ids=(1, 2)),
    "sampling": replace(GREEDY, sampling=SamplingParams(temperature=0.5, seed=1)),
    "stops": replace(GREEDY, stopping=StoppingParams(max_tokens=3)),
    "salt": replace(GREEDY, cache_salt="x"),
    "time": replace(GREEDY, stopping=StoppingParams(time_limit_s=1.0)),
    "deadline": replace(GREEDY, deadline_s=5.0),
}


@pytest.mark.parametrize("how", OTHERS)
async def test_requests_that_may_differ_are_not_coalesced(how: str) -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    first = OTHERS[how] if how in ("time", "deadline") else GREEDY
    one, _ = await table.start(ANYBODY, first)
    engine.last.say("x")
    await settle()
    wanted = first if how == "time" else replace(GREEDY, deadline_s=9.0) if how == "deadline" else OTHERS[how]
    two, shared = await table.start(ANYBODY, wanted)
    assert not shared
    assert len(engine.requests) == 2
    one.leave()
    two.leave()
    assert engine.running == 0


async def test_a_shorter_deadline_may_join_a_longer_one() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    await table.start(ANYBODY, replace(GREEDY, deadline_s=50.0))
    engine.last.start()
    await settle()
    assert (await table.start(ANYBODY, replace(GREEDY, deadline_s=5.0)))[1]


async def test_tenants_share_nothing() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    await table.start(Principal("k", "a"), GREEDY)
    _, shared = await asyncio.wait_for(table.start(Principal("k", "b"), GREEDY), 1)
    assert not shared
    assert [request.principal.tenant for request in engine.requests] == ["a", "b"]


async def test_a_prompt_is_prefilled_once() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    first, _ = await table.start(ANYBODY, CHANCE)
    others = [asyncio.create_task(table.start(ANYBODY, replace(CHANCE, request_id=f"{i}"))) for i in range(2)]
    engine.last.start()
    await settle()
    assert len(engine.requests) == 1  # they wait for its prefix
    engine.last.say("x")
    await settle()
    assert len(engine.requests) == 2  # the next one finds it, and so do those after it
    engine.last.say("y")
    await settle()
    assert len(engine.requests) == 3
    for run in (first, *[(await other)[0] for other in others]):
        run.leave()
    assert (engine.running, table.in_flight) == (0, 0)


async def test_a_joiner_is_admitted_before_joining_and_until_it_leaves() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    run, _ = await table.start(ANYBODY, GREEDY)
    joined, shared = await table.start(ANYBODY, replace(GREEDY, request_id="b"))
    assert (shared, len(engine.joined), engine.joined[0].is_open) == (True, 1, True)
    engine.refusal = RateLimitedError("k", "max_concurrent", 1, 1.0)
    with pytest.raises(RateLimitedError):
        await table.start(ANYBODY, replace(GREEDY, request_id="c"))
    with pytest.raises(RateLimitedError):  # nor does one wait for a prompt outside of the limits
        await table.start(ANYBODY, replace(CHANCE, request_id="d"))
    joined.leave()
    assert not engine.joined[0].is_open
    run.leave()
    assert (engine.running, table.in_flight) == (0, 0)


@pytest.mark.parametrize(
    "urgent", [replace(GREEDY, priority=10), replace(CHANCE, priority=10), replace(CHANCE, deadline_s=1.0)]
)
async def test_a_more_urgent_request_does_not_wait_for_its_twin(urgent: Request) -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    twin, _ = await table.start(ANYBODY, replace(GREEDY, priority=-10))
    run, shared = await table.start(ANYBODY, replace(urgent, request_id="b"))
    assert (shared, len(engine.requests)) == (False, 2)
    twin.leave()
    run.leave()
    assert (engine.running, table.in_flight) == (0, 0)


async def test_a_held_request_does_not_delay_a_more_important_one() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    for priority in (10, 0, 5):
        await table.start(ANYBODY, replace(CHANCE, request_id=str(priority), priority=priority))
    assert len(engine.requests) == 1
    engine.last.say("x")
    await settle()
    assert [request.request.priority for request in engine.requests] == [10, 0, 5]


async def test_no_request_waits_for_a_grammar_to_compile() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    grammar = GrammarParams(GrammarKind.REGEX, "a{1000}")
    await table.start(ANYBODY, replace(CHANCE, grammar=grammar))
    await table.start(ANYBODY, replace(CHANCE, request_id="b"))
    assert len(engine.requests) == 2


async def test_key_limits_apply_to_shared_answers() -> None:
    client = StubClient()
    doors = admission(client)
    who = principal(max_concurrent=2)
    first = doors.admit(who, replace(GREEDY, request_id="a"))
    joined = doors.join(who, replace(GREEDY, request_id="b"))
    assert (doors.in_flight, doors.waiting, client.in_flight) == (2, 1, 1)
    with pytest.raises(RateLimitedError):
        doors.join(who, replace(GREEDY, request_id="c"))
    joined.close()
    doors.join(who, replace(GREEDY, request_id="d")).close()
    first.close()
    assert (doors.in_flight, client.in_flight) == (0, 0)


async def test_short_prompts_do_not_wait() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    for i in range(3):
        await asyncio.wait_for(table.start(ANYBODY, replace(CHANCE, prompt_ids=(1,), request_id=f"{i}")), 1)
    assert len(engine.requests) == 3


@pytest.mark.parametrize("how", ["leaves", "fails", "ends"])
async def test_a_held_request_is_next_when_the_first_is_aborted(how: str) -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    first, _ = await table.start(ANYBODY, CHANCE)
    waiting = asyncio.create_task(table.start(ANYBODY, replace(CHANCE, request_id="b")))
    gone = asyncio.create_task(table.start(ANYBODY, replace(CHANCE, request_id="c")))
    await settle()
    (await gone)[0].leave()
    if how == "leaves":
        first.leave()
    elif how == "fails":
        engine.last.fail(EngineDeadError())
    else:
        engine.last.finish()
    await settle()
    assert waiting.done()
    assert len(engine.requests) == 2
    if how == "fails":
        with pytest.raises(EngineDeadError):
            await read(first)
    (await waiting)[0].leave()
    await settle()
    assert (engine.running, table.in_flight) == (0, 0)


async def test_readers_get_all_events_whenever_they_join() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    run, _ = await table.start(ANYBODY, GREEDY)
    engine.last.start()
    engine.last.say("a")
    early = asyncio.create_task(read(run))
    await settle()
    engine.last.say("b")
    await settle()
    late, _ = await table.start(ANYBODY, GREEDY)
    engine.last.finish()
    kinds = [type(event).__name__ async for event in late.read()]
    assert kinds == ["Started", "Delta", "Delta", "Finished"]
    assert await early == run.text == late.text == "ab"
    assert isinstance(run.finished, Finished)
    run.leave()
    late.leave()


async def test_unread_output_counts_for_each_reader() -> None:
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    run, _ = await table.start(ANYBODY, GREEDY)
    slow, _ = await table.start(ANYBODY, GREEDY)
    engine.last.start()
    reading = asyncio.create_task(read(run))
    engine.last.say("a" * 10_000)
    await settle()
    late, _ = await table.start(ANYBODY, GREEDY)
    each = weight_of(Delta("a", 0, [1] * 10_000, "a" * 10_000))
    assert 2 * each <= engine.unread.total < 2.1 * each
    slow.leave()
    engine.last.finish()
    await reading
    assert each <= engine.unread.total < 1.1 * each
    assert await read(late) == "a" * 10_000
    assert engine.unread.total == 0


async def test_a_long_answer_is_not_kept_for_further_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "MAX_HISTORY_BYTES", 5_000)
    engine = ScriptedEngine()
    table = RequestCoalescer(engine)
    first, _ = await table.start(ANYBODY, GREEDY)
    joined, shared = await table.start(ANYBODY, GREEDY)
    engine.last.say("a" * 10_000)
    await settle()
    other, also_shared = await table.start(ANYBODY, GREEDY)
    assert (shared, also_shared) == (True, False)
    for request in engine.requests:
        request.finish()
    assert [await read(run) for run in (first, joined, other)] == ["a" * 10_000, "a" * 10_000, ""]


async def test_a_reader_error_fails_the_run_and_closes_its_source() -> None:
    engine = ScriptedEngine()
    run, _ = await RequestCoalescer(engine).start(ANYBODY, GREEDY)
    pump = next(task for task in asyncio.all_tasks() if task.get_name() == "completion-run")
    engine.last.fail(ValueError("a bug"))
    with pytest.raises(Exception, match="reader broke"):
        await read(run)
    with pytest.raises(ValueError, match="a bug"):
        await pump
    assert engine.last.closed
