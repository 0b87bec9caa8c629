"""Outcomes are counted once each, however often they are reported, and the storage is bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.completion import editor_session, outcomes
from server.completion.documents import TextDocument
from server.completion.outcomes import Outcome, OutcomeLog
from tests.server.completion.scripted_engine import ScriptedEngine, sessions_on

ME = "me"
REPORTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Outcome)), max_size=12)


@given(REPORTS)
def test_each_change_of_a_suggestions_outcome_counts_once(reports: list[tuple[str, Outcome]]) -> None:
    log = OutcomeLog()
    for name in "abc":
        log.suggested(ME, name)
    last: dict[str, Outcome] = {}
    changes = Counter[str]()
    for name, outcome in reports:
        assert log.report(ME, name, outcome)
        changes[outcome] += last.get(name) is not outcome
        last[name] = outcome
    assert (log.metrics.suggestions, log.metrics.suggestion_outcomes) == (3, changes)


def test_suggestions_of_other_tenants_are_unknown() -> None:
    log = OutcomeLog()
    log.suggested(ME, "a")
    assert not log.report("other", "a", Outcome.ACCEPTED)
    assert not log.report(ME, "never", Outcome.SHOWN)
    assert (log.metrics.suggestions, log.metrics.suggestion_outcomes.total()) == (1, 0)


def test_remembered_suggestions_are_bounded() -> None:
    log = OutcomeLog()
    for i in range(outcomes.OUTCOME_SUGGESTIONS + 10):
        log.suggested(ME, f"{i}")
    assert not log.report(ME, "9", Outcome.SHOWN)
    assert log.report(ME, "10", Outcome.SHOWN)


def test_sessions_are_bounded_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor_session, "SESSIONS", 3)
    sessions = sessions_on(ScriptedEngine())
    first = sessions.open(ME, "0")
    for i in range(1, 4):
        sessions.open(ME, f"{i}")
    assert len(sessions._sessions) == 3
    first.keep("a", TextDocument("text", 1))
    assert sessions.open(ME, "0").documents == {}  # the session is evicted with its documents


def test_sessions_are_bounded_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor_session, "SESSION_CHARACTERS", 100)
    sessions = sessions_on(ScriptedEngine())
    for i in range(5):
        session = sessions.open(ME, f"{i}")
        session.keep("a", TextDocument("x" * 40, 1))
        sessions.used(ME, session)
    assert len(sessions._sessions) == 2


async def test_a_reconnected_client_finds_its_documents_and_ends_the_old_stream() -> None:
    sessions = sessions_on(ScriptedEngine())
    former = sessions.open(ME, "s")
    former.keep("a", TextDocument("text", 3))
    reopened = sessions.open(ME, "s")
    assert reopened.documents["a"].version == 3
    assert former.documents == {}
    assert sessions.open("other", "s").documents == {}
    assert len(sessions.open(ME, "").session_id) == 32
    assert editor_session.SESSIONS == 256
