"""Outcomes of suggestions that Tabby's clients report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import EVENTS, body, reached


def report(server: Server, completion: str, kind: str, query: str = "", **more: Any) -> None:
    """An event; the answer has no body, which clients read as text."""
    data = {"type": kind, "completion_id": completion, "choice_index": 0, **more}
    response = server.client.post(EVENTS + query, json=data)
    assert (response.status_code, response.content) == (200, b"")


def test_each_event_counts(server: Server) -> None:
    before = reached(server)
    completion = server.ask(**body())["id"]
    report(server, completion, "view", view_id="view-cmpl-1")
    report(server, completion, "dismiss", view_id="view-cmpl-1", elapsed=250)
    report(server, completion, "select", view_id="view-cmpl-1", elapsed=1234.5)
    assert reached(server) - before == {"shown": 1, "rejected": 1, "accepted": 1}


@pytest.mark.parametrize(("query", "more"), [("?select_kind=line", {}), ("", {"select_kind": "line"})])
def test_accepting_a_line_is_a_partial_acceptance(server: Server, query: str, more: dict[str, Any]) -> None:
    before = reached(server)
    report(server, server.ask(**body())["id"], "select", query, elapsed=1, **more)
    assert reached(server) - before == {"partially_accepted": 1}


def test_an_event_needs_the_salt_of_its_completion(server: Server) -> None:
    before, completion = reached(server), server.ask(**body(cache_salt="mine"))["id"]
    report(server, completion, "view")
    assert reached(server) == before
    report(server, completion, "view", cache_salt="mine")
    assert reached(server) - before == {"shown": 1}


def test_an_event_of_an_unknown_completion_is_accepted(server: Server) -> None:
    before = reached(server)
    report(server, "cmpl-unknown", "view")
    assert reached(server) == before


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("type", {"type": "look"}),
        ("type", {"type": None}),
        ("completion_id", {"completion_id": ""}),
        ("completion_id", {"completion_id": 5}),
        ("choice_index", {"choice_index": -1}),
    ],
)
def test_invalid_events_are_named(server: Server, named: str, fields: dict[str, Any]) -> None:
    status, error = server.refused(EVENTS, **{"type": "view", "completion_id": "cmpl-1", "choice_index": 0, **fields})
    assert (status, error["param"]) == (400, named)


def test_an_event_for_another_model_is_refused(server: Server) -> None:
    status, error = server.refused(EVENTS, type="view", completion_id="cmpl-1", model="other")
    assert (status, error["param"]) == (404, "model")
