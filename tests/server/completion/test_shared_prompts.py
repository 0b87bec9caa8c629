"""Equal prompts are computed once, by the most urgent request, and those that wait are admitted like any other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from server.admission import Admission
from server.auth.principal import ANYBODY, Limits, Principal
from server.completion.shared_prompts import CompletionRun, SharedPrompts
from server.errors import DeadlinePassedError, RateLimitedError, SlowReaderError, TokenQueueFullError
from server.request_stream import RequestStream, UnreadEvents
from server.served_model import ServedModel
from specdec.config import EngineConfig, ServerConfig
from specdec.core.types import MAX_QUEUED_REQUESTS, Delta, Finished, FinishReason, GrammarKind, GrammarParams, Request
from specdec.errors import DuplicateRequestError, EngineDeadError, QueueFullError
from tests.server.admission.stub_engine import StubClient, delta, finished, principal, started
from tests.server.completion.scripted_engine import ScriptedEngine

CALLER = principal()
FIRST = Request("first", tuple(range(100)))
SECOND = replace(FIRST, request_id="second")


class HoldingClient(StubClient):
    """Holds requests as `EngineClient` does."""

    def generate(self, request: Request, *, hold: bool = False) -> RequestStream:
        stream = super().generate(request, hold=hold)
        if hold:
            self.given.remove(request)
        return stream

    def release(self, stream: RequestStream) -> None:
        self.given.append(stream.request)


def prompts_over(
    client: StubClient, requests: int = MAX_QUEUED_REQUESTS, **config: Any
) -> tuple[SharedPrompts, Admission]:
    doors = Admission(client, ServerConfig(**config), max_queued_requests=requests)
    return SharedPrompts(doors), doors


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def outcome(run: CompletionRun) -> tuple[int, FinishReason]:
    """Tokens and finish reason."""
    events = [event async for event in run.read()]
    end = events[-1]
    assert isinstance(end, Finished)
    return sum(len(event.token_ids) for event in events if isinstance(event, Delta)), end.reason


async def test_a_prompt_is_computed_once_though_nobody_reads() -> None:
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine)
    runs = [prompts.start(ANYBODY, replace(FIRST, request_id=f"{i}")) for i in range(3)]
    engine.last.start()
    await settle()
    assert len(engine.requests) == 1  # the others wait for its prompt
    engine.last.say("x")
    await settle()
    assert [request.request_id for request in engine.requests] == ["0", "1", "2"]  # the prefix cache has it now
    for run, request in zip(runs, engine.requests, strict=True):
        request.finish()
        assert (await outcome(run))[1] is FinishReason.EOS
    assert [run.text for run in runs] == ["x", "", ""]
    prompts.start(ANYBODY, FIRST)  # what has ended holds up no other
    assert engine.running == 1


@pytest.mark.parametrize(
    "other",
    [
        (Principal("k", "b"), SECOND),
        (Principal("k", "a"), replace(SECOND, cache_salt="x")),
        (Principal("k", "a"), replace(SECOND, prompt_ids=tuple(range(1, 100)))),
    ],
    ids=["tenant", "salt", "prompt"],
)
async def test_only_callers_of_one_tenant_and_salt_share(other: tuple[Principal, Request]) -> None:
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine)
    prompts.start(Principal("k", "a"), FIRST)
    prompts.start(*other)
    assert len(engine.requests) == 2


async def test_an_ended_run_whose_salt_an_experiment_set_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    client = HoldingClient()
    prompts, doors = prompts_over(client)
    arm = SimpleNamespace(admit=lambda who, request, key, admit: admit(who, replace(request, cache_salt="arm"), key))
    monkeypatch.setattr(doors, "experiments", arm)
    run = prompts.start(CALLER, FIRST)
    client.say(delta(client.given[-1], 1))
    client.say(finished(client.given[-1], 1))
    run.leave()
    monkeypatch.setattr(doors, "experiments", None)  # the experiment has ended
    prompts.start(CALLER, SECOND)
    assert len(client.given) == 2  # at once


async def test_times_are_learned_for_the_caller_whose_salt_an_experiment_set(monkeypatch: pytest.MonkeyPatch) -> None:
    client, owners = HoldingClient(), list[str]()
    doors = Admission(client, ServerConfig())
    times: Any = SimpleNamespace(observe=lambda owner, request, cached, ms: owners.append(owner))
    arm = SimpleNamespace(admit=lambda who, request, key, admit: admit(who, replace(request, cache_salt="arm"), key))
    monkeypatch.setattr(doors, "experiments", arm)
    SharedPrompts(doors, times).start(CALLER, replace(FIRST, cache_salt="own"))
    given = client.given[-1]
    client.say(started(given))
    client.say(delta(given, 1))
    assert (given.cache_salt, owners) == (CALLER.scoped("arm"), [CALLER.scoped("own")])


async def test_the_wait_for_another_prompt_is_no_time_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    times: Any = SimpleNamespace(observe=lambda salt, request, cached, ms: seen.append(ms))
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr("server.completion.shared_prompts.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine, times)
    for name in "ab":
        prompts.start(ANYBODY, replace(FIRST, request_id=name))
    for spent_s in (6.0, 0.25):
        engine.last.start()
        clock.now_s += spent_s
        engine.last.say("x")
        await settle()
    assert seen == [6000.0, 250.0]


async def test_short_prompts_do_not_wait() -> None:
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine)
    for i in range(3):
        prompts.start(ANYBODY, Request(f"{i}", (1,)))
    assert len(engine.requests) == 3


async def test_no_request_waits_where_prompts_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = SimpleNamespace(engine=SimpleNamespace(config=EngineConfig(target="m", prefix_cache=False)))
    model, engine = ServedModel(client), ScriptedEngine()
    monkeypatch.setattr(model.completion.runs, "_admission", engine)
    model.completion.runs.start(ANYBODY, FIRST)
    model.completion.runs.start(ANYBODY, SECOND)
    assert len(engine.requests) == 2


async def test_no_request_waits_for_a_grammar_to_compile() -> None:
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine)
    prompts.start(ANYBODY, replace(FIRST, grammar=GrammarParams(GrammarKind.REGEX, "a{1000}")))
    prompts.start(ANYBODY, SECOND)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("how", ["leaves", "fails", "ends", "is too slow"])
async def test_a_held_request_is_next_when_the_first_ends_before_its_prompt(how: str) -> None:
    engine = ScriptedEngine()
    if how == "is too slow":
        engine.unread = UnreadEvents(1)
    prompts = SharedPrompts(engine)
    first, waiting, gone = (prompts.start(ANYBODY, replace(FIRST, request_id=name)) for name in "abc")
    await settle()
    gone.leave()
    if how == "leaves":
        first.leave()
    elif how == "fails":
        engine.last.fail(EngineDeadError())
    elif how == "ends":
        engine.last.finish(FinishReason.ABORTED)
    else:
        engine.last.start()
    await settle()
    assert [request.request_id for request in engine.requests] == ["a", "b"]
    if how in ("fails", "is too slow"):
        with pytest.raises((EngineDeadError, SlowReaderError)):
            await outcome(first)
    waiting.leave()
    await settle()
    assert engine.running == 0


async def test_a_held_request_does_not_delay_a_more_important_one() -> None:
    engine = ScriptedEngine()
    prompts = SharedPrompts(engine)
    for priority in (10, 0, 5):
        prompts.start(ANYBODY, replace(FIRST, request_id=str(priority), priority=priority))
    assert len(engine.requests) == 1
    engine.last.say("x")
    await settle()
    assert [request.request.priority for request in engine.requests] == [10, 0, 5]


@pytest.mark.parametrize("priority", [-1, 0, 1])
async def test_only_requests_of_higher_priority_do_not_wait(priority: int) -> None:
    client = HoldingClient()
    prompts, _ = prompts_over(client)
    prompts.start(CALLER, FIRST)
    prompts.start(CALLER, replace(SECOND, priority=priority))
    assert [given.priority for given in client.given] == ([0, 1] if priority > 0 else [0])


async def test_a_priority_above_the_keys_limit_is_ignored() -> None:
    client = HoldingClient()
    prompts, _ = prompts_over(client)
    caller = replace(CALLER, limits=Limits(max_priority=0))
    prompts.start(caller, FIRST)
    prompts.start(caller, replace(SECOND, priority=10))
    assert len(client.given) == 1


@pytest.mark.parametrize("scheduled", [False, True])
async def test_a_request_with_a_nearer_deadline_waits_only_for_what_is_scheduled(scheduled: bool) -> None:
    client = HoldingClient()
    prompts, _ = prompts_over(client)
    prompts.start(CALLER, FIRST)
    if scheduled:
        client.say(started(client.given[0]))
    prompts.start(CALLER, replace(SECOND, deadline_s=60.0))
    assert len(client.given) == (1 if scheduled else 2)


async def test_a_held_request_that_has_ended_is_not_submitted() -> None:
    client = HoldingClient()
    prompts, doors = prompts_over(client)
    first = prompts.start(CALLER, FIRST)
    client.say(started(client.given[0]))
    held = prompts.start(CALLER, replace(SECOND, deadline_s=60.0))
    assert (len(client.given), doors.waiting) == (1, 2)
    client.say(finished(held.source.request, 0, FinishReason.DEADLINE))  # as `EngineClient` does once it passes
    with pytest.raises(DeadlinePassedError):
        await outcome(held)
    client.say(delta(client.given[0], 3))
    client.say(finished(client.given[0], 3))
    assert await outcome(first) == (3, FinishReason.EOS)
    await settle()
    assert (len(client.given), doors.in_flight) == (1, 0)


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
    limits: dict[str, Any], requests: int, config: dict[str, int], error: type[Exception]
) -> None:
    prompts, doors = prompts_over(HoldingClient(), requests, **config)
    caller = principal(**limits)
    first = prompts.start(caller, FIRST)
    with pytest.raises(error):
        prompts.start(caller, SECOND)
    first.leave()
    assert doors.in_flight == 0


async def test_an_id_in_flight_is_rejected() -> None:
    prompts, _ = prompts_over(HoldingClient())
    prompts.start(CALLER, FIRST)
    with pytest.raises(DuplicateRequestError):
        prompts.start(CALLER, FIRST)
