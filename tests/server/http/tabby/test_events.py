"""Outcomes of suggestions that Tabby's clients report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.completion.editor import LINE
from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import EVENTS, body, total


def report(server: Server, completion: str, kind: str, query: str = "", **more: Any) -> None:
    """An event; the answer has no body, which clients read as text."""
    data = {"type": kind, "completion_id": completion, "choice_index": 0, **more}
    response = server.client.post(EVENTS + query, json=data)
    assert (response.status_code, response.content) == (200, b"")


def test_the_last_event_counts(server: Server) -> None:
    before = (total(server).shown, total(server).accepted, total(server).rejected, total(server).shown_characters)
    completion = server.ask(**body())["id"]
    report(server, completion, "view", view_id="view-cmpl-1")
    assert (total(server).shown, total(server).shown_characters) == (before[0] + 1, before[3] + len(LINE))
    report(server, completion, "dismiss", view_id="view-cmpl-1", elapsed=250)
    assert (total(server).rejected, total(server).accepted) == (before[2] + 1, before[1])
    report(server, completion, "select", view_id="view-cmpl-1", elapsed=1234.5)
    now = total(server)
    assert (now.shown, now.accepted, now.rejected) == (before[0] + 1, before[1] + 1, before[2])
    assert now.accepted_characters >= len(LINE)


@pytest.mark.parametrize(("query", "more"), [("?select_kind=line", {}), ("", {"select_kind": "line"})])
def test_accepting_a_line_is_a_partial_acceptance(server: Server, query: str, more: dict[str, Any]) -> None:
    before = (total(server).partially_accepted, total(server).accepted)
    report(server, server.ask(**body())["id"], "select", query, elapsed=1, **more)
    assert (total(server).partially_accepted, total(server).accepted) == (before[0] + 1, before[1])


def test_the_display_time_is_recorded(server: Server) -> None:
    before, completion = total(server).shown_ms, server.ask(**body())["id"]
    report(server, completion, "select", elapsed=40)
    assert total(server).shown_ms == before + 40


def test_an_event_needs_the_salt_of_its_completion(server: Server) -> None:
    before, completion = total(server).shown, server.ask(**body(cache_salt="mine"))["id"]
    report(server, completion, "view")
    assert total(server).shown == before
    report(server, completion, "view", cache_salt="mine")
    assert total(server).shown == before + 1


def test_an_event_of_an_unknown_completion_is_accepted(server: Server) -> None:
    before = total(server).shown
    report(server, "cmpl-unknown", "view")
    assert total(server).shown == before


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("type", {"type": "look"}),
        ("type", {"type": None}),
        ("completion_id", {"completion_id": ""}),
        ("completion_id", {"completion_id": 5}),
        ("elapsed", {"elapsed": -1}),
        ("elapsed", {"elapsed": "1s"}),
        ("choice_index", {"choice_index": -1}),
    ],
)
def test_invalid_events_are_named(server: Server, named: str, fields: dict[str, Any]) -> None:
    status, error = server.refused(EVENTS, **{"type": "view", "completion_id": "cmpl-1", "choice_index": 0, **fields})
    assert (status, error["param"]) == (400, named)
