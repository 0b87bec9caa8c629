"""The time of a prompt with an objective, which is learned for the caller's own scope."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from server.admission import Admission
from server.completion.time_budget import TimeBudget
from server.errors import SlowReaderError
from server.request_stream import UnreadEvents
from specdec.config import ServerConfig
from specdec.core.types import Finished, FinishReason, Request, Started
from tests.server.admission.stub_engine import StubClient, delta, principal, started
from tests.server.completion.scripted_engine import ScriptedEngine

CALLER = principal()
FIRST = Request("first", tuple(range(100)), omitted=(0, 0, 0, 0))


class Observed(TimeBudget):
    """What is learned from the requests of ``engine``. ``now_s`` is the clock."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.seen = 0.0, list[tuple[str, int, float]]()
        monkeypatch.setattr("server.completion.time_budget.time", SimpleNamespace(monotonic=lambda: self.now_s))
        engine.watch_prompt = self.watch

    def observe(self, owner: str, request: Request, cached: int, ttft_ms: float) -> None:
        self.seen.append((owner, cached, ttft_ms))


async def test_the_time_of_a_prompt_is_learned_once_though_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    engine.unread = UnreadEvents(2048)  # the third event is too much
    observed = Observed(engine, monkeypatch)
    stream = engine.admit(CALLER, FIRST, "")
    observed.now_s = 0.25
    engine.last.start(64, queue_ms=200.0)  # for a place, or for the prompt of another request
    observed.now_s = 0.5
    engine.last.say("x")
    engine.last.say("y")
    assert observed.seen == [(CALLER.scoped(""), 64, pytest.approx(300.0))]
    with pytest.raises(SlowReaderError):
        _ = [event async for event in stream]


@pytest.mark.parametrize(("reason", "learned"), [(FinishReason.LENGTH, True), (FinishReason.ABORTED, False)])
async def test_a_request_without_a_token_has_no_time(
    reason: FinishReason, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    observed = Observed(engine, monkeypatch)
    stream = engine.admit(CALLER, FIRST, "")
    engine.last.start()
    engine.last.finish(reason)
    assert observed.seen == ([(CALLER.scoped(""), 0, math.inf)] if learned else [])
    first, last = [event async for event in stream]
    assert isinstance(first, Started)
    assert isinstance(last, Finished)
    assert last.reason is reason


async def test_times_are_learned_for_the_caller_whose_salt_an_experiment_set(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient()
    doors = Admission(client, ServerConfig())
    observed = Observed(doors, monkeypatch)
    arm = SimpleNamespace(
        admit=lambda who, request, key, admit, asks_again: admit(who, replace(request, cache_salt="arm"), key)
    )
    monkeypatch.setattr(doors, "experiments", arm)
    doors.admit(CALLER, replace(FIRST, cache_salt="own"))
    given = client.given[-1]
    client.say(started(given))
    client.say(delta(given, 1))
    doors.admit(CALLER, replace(FIRST, request_id="without an objective", omitted=None))
    client.say(delta(client.given[-1], 1))
    (learned,) = observed.seen
    assert (given.cache_salt, learned[0]) == (CALLER.scoped("arm"), CALLER.scoped("own"))
