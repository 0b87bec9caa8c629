"""Any body gets an answer or a 4xx status, and the server keeps serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http.llamacpp import COMPLETION_FIELDS, DETOKENIZE_FIELDS, INFILL_FIELDS, TOKENIZE_FIELDS
from server.request_fields import schemas
from tests.server.http.harness import Server, events
from tests.server.http.tabby.book_server import book_server
from tests.server.http.test_fuzz import ANY

# The book engine makes one sample, and its salts are scripts.
UNTRIED = {"cache_salt", "n_cmpl"}
CASES = [
    ("/infill", INFILL_FIELDS, {"input_prefix": "def ", "input_suffix": "z", "prompt": "", "n_predict": 3}),
    ("/completion", COMPLETION_FIELDS, {"prompt": "def ", "n_predict": 3}),
    ("/tokenize", TOKENIZE_FIELDS, {"content": "a"}),
    ("/detokenize", DETOKENIZE_FIELDS, {"tokens": [97]}),
]


@pytest.fixture(scope="module")
def book() -> Iterator[Server]:
    """A server over the book engine."""
    with book_server() as found:
        yield found


@pytest.mark.parametrize(("path", "fields", "good"), CASES)
def test_any_values_in_known_fields(book: Server, path: str, fields: Any, good: dict[str, Any]) -> None:
    some = st.dictionaries(st.sampled_from(sorted(set(schemas(fields)) - UNTRIED)), ANY, max_size=4)

    @settings(max_examples=200)
    @given(body=st.tuples(st.booleans(), some).map(lambda pair: (good if pair[0] else {}) | pair[1]))
    def check(body: dict[str, Any]) -> None:
        response = book.client.post(path, content=json.dumps(body))
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert error["code"] == response.status_code
        elif response.headers["content-type"] == "text/event-stream":
            assert [event.get("stop", True) for event in events(response.content)][-1]
        else:
            assert isinstance(response.json(), dict)

    check()
    assert book.comes_to(lambda: book.serving.client.in_flight == 0)
    assert book.serving.client.engine.restarts == 0
