"""A stream's lines, and when its text came."""

from __future__ import annotations

import pytest

from bench.peers.clients import CompletionStream
from bench.peers.peer import PeerError

USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 5}}'


def test_times_are_those_of_the_first_text_and_of_the_end() -> None:
    stream = CompletionStream(10.0)
    for now, line in (
        (11.0, ": a comment"), (11.1, ""), (11.2, 'data: {"choices": [{"text": ""}]}'),
        (12.0, 'data: {"choices": [{"text": "a"}], "usage": null}'), (13.0, 'data: {"choices": [{"text": "b"}]}'),
        (14.0, USAGE), (20.0, "data: [DONE]"),
    ):  # fmt: skip
        stream.feed(line, now)
    found = stream.answer()
    assert (found.ttft_ms, found.e2e_ms, found.tokens, found.text) == (2000.0, 4000.0, 5, "ab")
    assert found.tpot_ms == 500.0


def test_an_answer_without_text_ends_where_it_begins() -> None:
    stream = CompletionStream(1.0)
    stream.feed(USAGE, 3.0)
    assert (stream.answer().ttft_ms, stream.answer().e2e_ms) == (2000.0, 2000.0)


@pytest.mark.parametrize(
    "line",
    ["data: nonsense", "data: 5", 'data: {"choices": [5]}', 'data: {"error": {"message": "full"}}',
     'data: {"usage": {}}', 'data: {"usage": {"completion_tokens": "x"}}'],
)  # fmt: skip
def test_what_is_no_completion_is_an_error(line: str) -> None:
    with pytest.raises(PeerError):
        CompletionStream(0.0).feed(line, 1.0)


def test_a_stream_that_was_cut_is_no_answer() -> None:
    stream = CompletionStream(0.0)
    stream.feed('data: {"choices": [{"text": "a"}]}', 1.0)
    with pytest.raises(PeerError, match="usage"):
        stream.answer()
