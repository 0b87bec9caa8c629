"""Any body gets an answer or a 4xx status, and the server keeps serving."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http import llamacpp, tabby
from server.http.anthropic import MESSAGE_FIELDS
from server.http.embeddings import EMBEDDING_FIELDS, RERANK_FIELDS
from server.http.mistral import FIM_FIELDS
from server.http.ollama import EMBED_FIELDS
from server.http.openai_chat import CHAT_FIELDS
from server.http.openai_completions import COMPLETION_FIELDS
from server.http.responses import RESPONSES_FIELDS
from server.http.tabby import EVENT_FIELDS, SEGMENT_FIELDS
from server.request_fields import schemas
from specdec.config import EngineConfig
from tests.fake_engine import EMBEDDER, SEVERAL
from tests.server.http.harness import CHAT, COMPLETIONS, MESSAGES, RESPOND, Server, events, running
from tests.server.http.tabby.book_server import book_server

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from([2**31, 2**64, -(2**63), 1e308, -0.0, "", "auto", "off", "text", "\x00"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "function", "name", "schema", "json_schema", "mode", "5"])
        | st.text(max_size=3),
        inner,
        max_size=3,
    ),
    max_leaves=5,
)  # fmt: skip


# The fake engines' scripts are not for strangers, and the book engine makes one sample.
UNTRIED = {"cache_salt", "n_cmpl"}


# What Tabby's agent adds from other files
SNIPPETS = st.lists(
    st.fixed_dictionaries({"body": st.just("x") | ANY}, optional={"filepath": ANY, "score": ANY}), max_size=2
)


def values_of(fields: Any, values: st.SearchStrategy[Any] = ANY) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields, with unknown values."""
    return st.dictionaries(st.sampled_from(sorted(set(schemas(fields)) - UNTRIED)), values, max_size=4)


def bodies(fields: Any, good: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of known fields with unknown values, mostly around a good one."""
    some = values_of(fields)
    if "segments" in schemas(fields):
        segments = values_of(SEGMENT_FIELDS, ANY | SNIPPETS).map(lambda given: {"prefix": "def "} | given)
        some = some | st.tuples(some, segments).map(lambda pair: pair[0] | {"segments": pair[1]})
    return st.tuples(st.booleans(), some).map(lambda pair: (good if pair[0] else {}) | pair[1])


CASES = [
    (COMPLETIONS, COMPLETION_FIELDS, {"prompt": "hi", "max_tokens": 3}),
    (CHAT, CHAT_FIELDS, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ("/v1/fim/completions", FIM_FIELDS, {"prompt": "hi", "max_tokens": 3}),
    (MESSAGES, MESSAGE_FIELDS, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    (RESPOND, RESPONSES_FIELDS, {"input": "hi", "max_output_tokens": 3}),
    ("/v1/rerank", RERANK_FIELDS, {"query": "hi", "documents": ["a"]}),
]
EMBEDDINGS = [
    ("/v1/embeddings", EMBEDDING_FIELDS, {"input": "hi"}),
    ("/api/embed", EMBED_FIELDS, {"input": ["hi"]}),
]
LLAMA = [
    ("/infill", llamacpp.INFILL_FIELDS, {"input_prefix": "def ", "input_suffix": "z", "prompt": "", "n_predict": 3}),
    ("/completion", llamacpp.COMPLETION_FIELDS, {"prompt": "def ", "n_predict": 3}),
    ("/tokenize", llamacpp.TOKENIZE_FIELDS, {"content": "a"}),
    ("/detokenize", llamacpp.DETOKENIZE_FIELDS, {"tokens": [97]}),
]
TABBY = [
    (COMPLETIONS, tabby.COMPLETION_FIELDS, {"language": "c", "segments": {"prefix": "def "}}),
    ("/v1/events", EVENT_FIELDS, {"type": "view", "completion_id": "cmpl-1", "choice_index": 0}),
]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    """A server of a model made for embeddings."""
    with running(factory=SEVERAL, engine=EngineConfig(target=EMBEDDER)) as found:
        yield found


@pytest.fixture(scope="module")
def book() -> Iterator[Server]:
    """A server over the book engine."""
    with book_server() as found:
        yield found


@pytest.mark.parametrize(("path", "fields", "good"), CASES)
def test_any_values_in_known_fields(server: Server, path: str, fields: Any, good: dict[str, Any]) -> None:
    check_values(server, path, fields, good)


@pytest.mark.parametrize(("path", "fields", "good"), EMBEDDINGS)
def test_any_values_of_an_embeddings_call(embedder: Server, path: str, fields: Any, good: dict[str, Any]) -> None:
    check_values(embedder, path, fields, good)


@pytest.mark.parametrize(("path", "fields", "good"), LLAMA)
def test_any_values_of_llama_cpps_calls(book: Server, path: str, fields: Any, good: dict[str, Any]) -> None:
    def check(response: httpx.Response) -> None:
        if response.status_code != 200:
            assert response.json()["error"]["code"] == response.status_code
        elif response.headers["content-type"] == "text/event-stream":
            assert [event.get("stop", True) for event in events(response.content)][-1]
        else:
            assert isinstance(response.json(), dict)

    check_values(book, path, fields, good, check)


@pytest.mark.parametrize(("path", "fields", "good"), TABBY)
def test_any_values_of_tabbys_calls(book: Server, path: str, fields: Any, good: dict[str, Any]) -> None:
    check_values(book, path, fields, good, lambda response: None)


def check_answer(response: httpx.Response) -> None:
    """Check an answer in the dialects of OpenAI and Anthropic, or of Ollama's embeddings."""
    if response.status_code != 200:
        error = response.json()["error"]
        assert error if response.url.path.startswith("/api/") else error["message"] and error["code"]
    elif response.text.startswith("event: "):
        last = response.text.removesuffix("\n\n").split("\n\n")[-1]
        assert last.startswith(("event: message_stop", "event: response.completed", "event: response.incomplete"))
    elif response.headers["content-type"] == "text/event-stream":
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        answer = response.json()
        assert answer.get("choices") or answer.keys() & {"content", "output", "data", "embeddings"}


def check_values(
    server: Server,
    path: str,
    fields: Any,
    good: dict[str, Any],
    check_one: Callable[[httpx.Response], None] = check_answer,
) -> None:
    @settings(max_examples=150)
    @given(body=bodies(fields, good))
    def check(body: dict[str, Any]) -> None:
        response = server.client.post(path, content=json.dumps(body))
        assert response.status_code in (200, 400, 404, 409, 422), response.text  # 409: of another server's numbers
        check_one(response)

    check()
    assert server.comes_to(lambda: server.serving.client.in_flight == 0)
    assert server.serving.client.engine.restarts == 0


@settings(max_examples=150)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_any_bytes(server: Server, data: bytes) -> None:
    for path in (
        COMPLETIONS,
        CHAT,
        "/v1/fim/completions",
        "/infill",
        "/completion",
        "/tokenize",
        "/detokenize",
        MESSAGES,
        RESPOND,
    ):
        assert server.client.post(path, content=data).status_code == 400


@settings(max_examples=100)
@given(prefix=st.text(max_size=5), depth=st.integers(0, 3000), close=st.booleans())
def test_any_depth(server: Server, prefix: str, depth: int, close: bool) -> None:
    for path, name in (
        (COMPLETIONS, "guided_json"),
        (CHAT, "tools"),
        (CHAT, "messages"),
        (MESSAGES, "messages"),
        (MESSAGES, "tools"),
        (RESPOND, "input"),
        (RESPOND, "metadata"),
    ):
        nested = b'{"a":' * depth + json.dumps(prefix).encode() + b"}" * (depth if close else 0)
        data = b'{"prompt":"hi","max_tokens":1,"%b":[%b]}' % (name.encode(), nested)
        assert server.client.post(path, content=data).status_code == 400
