"""Outcomes are counted once each, however often they are reported, and the storage is bounded."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from server.completion import service as outcome_log
from server.completion import service as session_table
from server.completion.documents import TextDocument
from server.completion.service import Acceptance, Outcome, OutcomeLog, SessionTable
from tests.server.completion.scripted_engine import ScriptedEngine, service_on

ME = ("tenant", "salt")
REPORTS = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.sampled_from(Outcome), st.integers(0, 30), st.integers(0, 500).map(float)
    ), max_size=12,
)  # fmt: skip
SIZES = {"a": 10, "b": 20, "c": 5}


@given(REPORTS)
def test_the_last_report_of_a_suggestion_counts(reports: list[tuple[str, Outcome, int, float]]) -> None:
    log = OutcomeLog()
    for name, size in SIZES.items():
        log.suggested(ME, name, "s" if name != "c" else "", size)
    last: dict[str, tuple[Outcome, int]] = {}
    shown: dict[str, float] = {}
    for name, outcome, accepted, ms in reports:
        assert log.report(ME, name, outcome, accepted, ms)
        last[name] = (outcome, accepted)
        shown[name] = max(ms, shown.get(name, 0.0))
    expected, of_session = Acceptance(suggested=3), Acceptance(suggested=2)
    for name, (outcome, accepted) in last.items():
        taken = {Outcome.ACCEPTED: SIZES[name], Outcome.PARTIALLY_ACCEPTED: min(accepted, SIZES[name])}.get(outcome, 0)
        for figures in (expected, of_session) if name != "c" else (expected,):
            figures.shown += 1
            figures.shown_characters += SIZES[name]
            figures.shown_ms += shown[name]
            figures.accepted_characters += taken
            setattr(figures, outcome.value, getattr(figures, outcome.value) + (outcome is not Outcome.SHOWN))
    assert log.total == expected
    assert log.of_session(ME, "s") == of_session


def test_suggestions_of_other_tenants_are_unknown() -> None:
    log = OutcomeLog()
    log.suggested(ME, "a", "s", 4)
    log.suggested(ME, "empty", "s", 0)
    assert not log.report(("other", "salt"), "a", Outcome.ACCEPTED, 0, 0)
    assert not log.report(ME, "empty", Outcome.SHOWN, 0, 0)
    assert not log.report(ME, "never", Outcome.SHOWN, 0, 0)
    assert log.of_session(("other", "salt"), "s") is None
    assert log.session_of(("other", "salt"), "a") == ""
    assert log.total == Acceptance(suggested=1)


def test_remembered_suggestions_are_bounded() -> None:
    log = OutcomeLog()
    for i in range(outcome_log.OUTCOME_SUGGESTIONS + 10):
        log.suggested(ME, f"{i}", f"{i}", 1)
    assert not log.report(ME, "9", Outcome.SHOWN, 0, 0)
    assert log.report(ME, "10", Outcome.SHOWN, 0, 0)
    assert log.of_session(ME, "10") is not None
    assert log.of_session(ME, "11") is None
    assert len(log._sessions) == outcome_log.OUTCOME_SESSIONS


def table(clock: Callable[[], float] = lambda: 0.0, **limits: float) -> SessionTable:
    service = service_on(ScriptedEngine())
    return SessionTable(service._new_session, clock=clock, **limits)  # type: ignore[arg-type]


def test_sessions_are_bounded_by_number() -> None:
    sessions = table(sessions=3)
    first = sessions.open(ME, "0")
    for i in range(1, 4):
        sessions.open(ME, f"{i}")
    assert len(sessions) == 3
    first.keep("a", TextDocument("text", 1))
    assert sessions.open(ME, "0").documents == {}  # the session is evicted with its documents


def test_sessions_are_bounded_by_age() -> None:
    now = [0.0]
    sessions = table(lambda: now[0], idle_s=10.0)
    old = sessions.open(ME, "old")
    kept = sessions.open(ME, "kept")
    now[0] = 9.0
    sessions.used(ME, kept)
    now[0] = 15.0
    sessions.open(ME, "new")
    assert len(sessions) == 2
    sessions.used(ME, old)  # its stream is still open, but a reconnected client finds no documents
    assert len(sessions) == 2


def test_sessions_are_bounded_by_size() -> None:
    sessions = table(characters=100)
    for i in range(5):
        session = sessions.open(ME, f"{i}")
        session.keep("a", TextDocument("x" * 40, 1))
        sessions.used(ME, session)
    assert len(sessions) == 2


async def test_a_reconnected_client_finds_its_documents_and_ends_the_old_stream() -> None:
    engine = ScriptedEngine()
    service = service_on(engine)
    former = service.sessions.open(ME, "s")
    former.keep("a", TextDocument("text", 3))
    reopened = service.sessions.open(ME, "s")
    assert reopened.documents["a"].version == 3
    assert former.documents == {}
    assert service.sessions.open(("other", "salt"), "s").documents == {}
    assert len(service.sessions.open(ME, "").session_id) == 32
    assert session_table.SESSIONS == 256
