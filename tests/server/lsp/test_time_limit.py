"""An editor's time limit determines when it is answered, even if the server is still generating."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from server.completion.documents import OffsetUnit
from server.lsp import session
from server.lsp.documents import OpenDocument, Settings
from server.lsp.session import Answer, LiveSession, Notices, SessionLink, SuggestionRequest
from specdec.api.v1 import completion_pb2 as pb


def link_to(live: LiveSession, limit_ms: float | None) -> SessionLink:
    """A link with a session whose server side is the test."""
    notices = Notices(lambda text: None, lambda *args: None)
    link = SessionLink(lambda _: pytest.fail("it connected"), Settings(timeLimitMs=limit_ms), notices)
    link._live, live.ready = live, True
    return link


def made() -> tuple[LiveSession, SuggestionRequest]:
    unused: Any = None
    document = OpenDocument("file:///a", "a", "markdown", "x", OffsetUnit.UTF16)
    return LiveSession(unused, lambda _: None, lambda _: None), SuggestionRequest(document, document.revision, 1)


def say(live: LiveSession, ask_id: int, text: str) -> None:
    live._take(pb.CompleteSessionResponse(started=pb.SuggestionStarted(ask_id=ask_id, suggestion_id="s")))
    live._take(pb.CompleteSessionResponse(delta=pb.SuggestionDelta(ask_id=ask_id, text=text)))


@pytest.mark.parametrize(
    ("generated", "given"),
    [
        ("one two thr", "one two"), ("one two ", "one two"), ("one, two.", "one, two."), ("line\n  ne", "line"),
        ("line\n", "line"), ("\n  ne", None), ("Wör", None), ("", None),
    ],
)  # fmt: skip
async def test_at_the_limit_the_partial_answer_is_cut_at_a_word(generated: str, given: str | None) -> None:
    live, request = made()
    waiting = asyncio.create_task(link_to(live, 20.0).complete(request))
    await asyncio.sleep(0)
    say(live, 1, generated)
    assert await waiting == ([] if given is None else [Answer("s", given)])


async def test_an_answer_within_the_limit_is_complete() -> None:
    live, request = made()
    waiting = asyncio.create_task(link_to(live, 60_000.0).complete(request))
    await asyncio.sleep(0)
    say(live, 1, "one two thr")
    live._take(pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=1)))
    assert await waiting == [Answer("s", "one two thr")]


async def test_reading_ahead_waits_for_a_request_that_met_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "GRACE_S", 60.0)
    live, request = made()
    link = link_to(live, 1.0)
    assert await link.complete(request) == []
    reading = asyncio.create_task(link.read_ahead(replace(request, read_ahead=True)))
    await asyncio.sleep(0)
    assert not reading.done()
    assert not live._unsent.get_nowait().ask.read_ahead
    assert live._unsent.empty()
    live._take(pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=1)))
    async with asyncio.timeout(10):
        assert (await live._unsent.get()).ask.read_ahead
    live._take(pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=2)))
    await reading


async def test_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SILENT_S", 0.01)
    for received in (False, True):
        live, request = made()
        link = link_to(live, 1.0)
        assert await link.complete(request) == []
        if received:
            live._take(pb.CompleteSessionResponse(finished=pb.SuggestionFinished(ask_id=1)))
            await asyncio.sleep(0.05)
            assert link._trouble == ""
        else:
            async with asyncio.timeout(10):
                while "does not answer" not in link._trouble:
                    await asyncio.sleep(0.01)


async def test_without_a_limit_a_text_that_takes_long_is_given_as_far_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "NO_LIMIT_S", 0.02)
    live, request = made()
    waiting = asyncio.create_task(link_to(live, None).complete(request))
    await asyncio.sleep(0)
    say(live, 1, "one two thr")
    assert await waiting == [Answer("s", "one two")]


async def test_a_server_that_has_gone_silent_is_not_said_to_have_ended_the_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "SILENT_S", 0.01)
    seen: list[dict[str, str]] = []
    connect = Mock(side_effect=lambda _: SlowToClose())
    link = SessionLink(connect, Settings(timeLimitMs=1.0), Notices(lambda text: None, seen.append))
    link.start()
    await asyncio.sleep(0.01)
    assert link._live is not None
    link._live.ready = True
    assert await link.complete(made()[1]) == []
    async with asyncio.timeout(10):
        while not seen:
            await asyncio.sleep(0.01)
    assert (seen[-1]["state"], "does not answer" in seen[-1]["message"]) == ("away", True)
    await asyncio.sleep(0.01)
    assert [asked.args for asked in connect.mock_calls] == [(0,), (1,)]
    await link.close()


class SlowToClose:
    """A client that never sets up its session, and takes a while to close."""

    async def __aenter__(self) -> SlowToClose:
        return self

    async def __aexit__(self, *args: object) -> None:
        await asyncio.sleep(0.05)

    @property
    def completion(self) -> SlowToClose:
        return self

    def session(self) -> SlowToClose:
        return self

    async def send(self, message: object) -> None:
        pass

    def __aiter__(self) -> SlowToClose:
        return self

    async def __anext__(self) -> object:
        return await asyncio.Event().wait()


async def test_switching_suggestions_off_and_on_fast_leaves_one_session() -> None:
    connect = Mock(side_effect=lambda _: SlowToClose())
    seen: list[dict[str, str]] = []
    link = SessionLink(connect, Settings(), Notices(lambda text: None, seen.append))
    link.start()
    await asyncio.sleep(0)
    for _ in range(2):
        link.configure(Settings(mode="off"))
        link.configure(Settings())
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert link._live is not None
    link.configure(Settings(mode="off"))
    await asyncio.sleep(0.2)
    assert link._live is None
    assert [status["state"] for status in seen] == ["off"]
    assert {asked.args for asked in connect.mock_calls} == {(0,)}  # none has failed: no other server is asked
    await link.close()


class Ready(SlowToClose):
    """A client whose server is ready when the test says so."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[object] = asyncio.Queue()

    async def __anext__(self) -> object:
        return await self.said.get()


async def test_bug_a_session_that_was_stopped_does_not_become_ready() -> None:
    client: Any = Ready()
    seen: list[dict[str, str]] = []
    link = SessionLink(lambda _: client, Settings(), Notices(lambda text: None, seen.append))
    link.start()
    await asyncio.sleep(0.01)
    client.said.put_nowait(pb.CompleteSessionResponse(ready=pb.SessionReady(session_id="s", fills_in=True)))
    link.configure(Settings(mode="off"))
    await asyncio.sleep(0.2)
    await link.close()
    assert [status["state"] for status in seen] == ["off"]
