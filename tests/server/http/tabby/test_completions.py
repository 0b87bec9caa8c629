"""Answers of Tabby's /v1/completions."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.fake_engine import BOOK, DEFAULT_SEED
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.editor import AT, BEHIND, LINE
from tests.server.http.harness import Server
from tests.server.http.tabby.book_server import COMPLETIONS, body, book_server, segments


def test_response(server: Server) -> None:
    metrics = server.serving.models.first.outcomes.metrics
    before = metrics.suggestions
    answer = server.ask(**body())
    assert answer.pop("id").startswith("cmpl-")
    assert set(answer.pop("metrics")) == {"speculative_decoding"}
    assert answer == {"choices": [{"index": 0, "text": LINE}], "mode": "standard", "seed": DEFAULT_SEED}
    assert metrics.suggestions == before + 1


def test_omitted_and_null_fields(server: Server) -> None:
    bare: dict[str, Any] = {
        "segments": {"prefix": BOOK[:AT], "suffix": None, "filepath": None},
        "seed": None,
    }
    assert server.ask(**bare)["choices"][0]["text"].startswith(LINE)


def test_openai_bodies_stay_openai(server: Server) -> None:
    for more in ({}, {"language": "python"}, {"segments": segments()}):
        answer = server.ask(prompt="def mean(", max_tokens=6, **more)
        assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "values")


def test_completions_use_the_documents_line_breaks(server: Server) -> None:
    at = BOOK.index("for value")
    given = {"prefix": BOOK[:at].replace("\n", "\r\n"), "suffix": "\r\n" + BOOK[BEHIND:].replace("\n", "\r\n")}
    answer = server.ask(**body(segments=given))
    assert answer["choices"][0]["text"] == f"for value in values:\r\n        {LINE}"


def test_a_blank_line_ends_the_completion(server: Server) -> None:
    given = {"prefix": "return total / len(", "suffix": ""}  # at the margin: there is no indentation to leave
    assert server.ask(segments=given)["choices"][0]["text"] == "values)"


def test_a_disconnect_cancels_the_request(server: Server) -> None:
    aborts, data = server.load.prefix_hit_tokens, json.dumps(body(cache_salt="slow", seed=99)).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    connection.sendall(head + data)
    assert server.comes_to(lambda: server.serving.client.in_flight == 1)
    connection.close()
    assert server.idle(aborts + 1)


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("segments", {"segments": None}),
        ("segments", {"segments": "text"}),
        ("segments.prefix", {"segments": {}}),
        ("segments.prefix", {"segments": {"prefix": 5}}),
        ("segments.suffix", {"segments": {"prefix": "", "suffix": []}}),
        ("segments.declarations", {"segments": {"prefix": "", "declarations": {}}}),
        ("segments.declarations[0].body", {"segments": {"prefix": "", "declarations": [{"body": 1}]}}),
        ("temperature", {"temperature": -1}),
        ("seed", {"seed": "x"}),
        ("mode", {"mode": "next_edit_suggestion"}),
        ("speculation.mode", {"speculation": {"mode": "fast"}}),
        ("speculation.drafters", {"speculation": {"drafters": ["nobody"]}}),
    ],
)
def test_invalid_fields_are_named(server: Server, named: str, fields: dict[str, Any]) -> None:
    status, error = server.refused(**body(**fields))
    assert (status, error["param"]) == (400, named)


def test_a_body_without_segments_and_prompt_is_400(server: Server) -> None:
    bodies: list[dict[str, Any]] = [{"language": "python"}, {"segments": None}]
    for asked in bodies:
        status, error = server.refused(**asked)
        assert (status, error["param"]) == (400, "segments")


def test_a_model_without_fill_in_the_middle_is_an_error() -> None:
    with book_server(lambda: CodeTokenizer(("<file_sep>",))) as server:
        status, error = server.refused(**body())
        assert (status, error["code"]) == (422, "fim_not_supported")
        assert "no tokens for filling in the middle" in error["message"]
        assert server.client.post(COMPLETIONS, json={"prompt": "def mean("}).status_code == 200
        assert "model" not in server.client.get("/v1/health").json()
