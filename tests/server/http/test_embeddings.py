"""/v1/embeddings, /v1/rerank and Ollama's /api/embed, with an embedder and a reranker beside a writer."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from server.http.embeddings import IN_FLIGHT, MAX_INPUTS
from server.serving import Serving
from specdec.core.types import Pooling, Request
from tests.fake_engine import CHAT, EMBEDDER, EMBEDDING_SIZE, RERANKER, SEVERAL, embedding_of
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.harness import quick_policy
from tests.server.http.harness import COMPLETIONS, Server, running_serving
from tests.server.several_models import make_several

EMBED, RERANK, END = "/v1/embeddings", "/v1/rerank", 3
ENGINES: dict[str, dict[str, Any]] = {
    "chat": {"target": CHAT}, "embed": {"target": EMBEDDER, "aliases": ["text-embedding-3-small"]},
    "rank": {"target": RERANKER},
}  # fmt: skip


class Tokenizer(FakeTokenizer):
    """Ends embedded texts; "yes" and "no" are tokens."""

    end_id = END  # type: ignore[assignment]

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return [ord(text[0])] if text in ("yes", "no") else super().encode(text, add_special=add_special)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_serving(
        lambda: Serving(make_several(ENGINES), lambda _: Tokenizer(), factory=SEVERAL, policy=quick_policy())
    ) as found:
        yield found


def expected(text: str | list[int], size: int = EMBEDDING_SIZE) -> list[float]:
    """The fake engine's embedding of a text, with its begin and end tokens, or of token ids."""
    ids = tuple(text) if isinstance(text, list) else (BOS, *text.encode(), END)
    values = np.frombuffer(embedding_of(Request("", ids, pooling=Pooling.LAST)), "<f4")[:size].astype(float)
    return list(values / np.linalg.norm(values))


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "texts"),
    [("a", ["a"]), (["b", "a", "b"], ["b", "a", "b"]), ([7, 8], [[7, 8]]), ([[7, 8], [9]], [[7, 8], [9]])],
)
@pytest.mark.parametrize("named", [{}, {"model": "embed"}, {"model": "text-embedding-3-small"}])
def test_every_form_of_input(server: Server, given: Any, texts: list[Any], named: dict[str, str]) -> None:
    answer = server.ask(EMBED, input=given, **named)
    assert [row["index"] for row in answer["data"]] == list(range(len(texts)))
    for row, text in zip(answer["data"], texts, strict=True):
        assert row["embedding"] == close(expected(text))
    tokens = sum(len(text) + 2 * isinstance(text, str) for text in texts)
    assert (answer["model"], answer["usage"]) == ("embed", {"prompt_tokens": tokens, "total_tokens": tokens})


def test_more_texts_than_the_engine_has_places_keep_their_order(server: Server) -> None:
    texts = [f"text {i}" for i in range(300)]  # more than may wait, too
    rows = server.ask(EMBED, input=texts)["data"]
    assert [row["embedding"] for row in rows] == [close(expected(text)) for text in texts]


@pytest.mark.parametrize("size", [1, 3, EMBEDDING_SIZE])
def test_dimensions_and_base64(server: Server, size: int) -> None:
    rows = server.ask(EMBED, input="a", dimensions=size, encoding_format="base64")["data"]
    values = np.frombuffer(base64.b64decode(rows[0]["embedding"]), "<f4")
    assert list(values) == close(expected("a", size))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")  # asks for base64
    found = client.embeddings.create(model="embed", input=["a"], dimensions=size)
    assert found.data[0].embedding == close(expected("a", size))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (EMBED, {}, "input"), (EMBED, {"input": []}, "input"), (EMBED, {"input": ""}, "input"),
        (EMBED, {"input": ["a", ""]}, "input[1]"), (EMBED, {"input": ["a", 5]}, "input"),
        (RERANK, {"query": "q", "documents": ["a"] * (MAX_INPUTS + 1)}, "documents"),
        (EMBED, {"input": ["a"] * (MAX_INPUTS + 1)}, "input"), (EMBED, {"input": [1 << 30]}, "input"),
        (EMBED, {"input": "x" * 2000}, "input"),
        (EMBED, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBED, {"input": "a", "dimensions": EMBEDDING_SIZE + 1}, "dimensions"),
        (EMBED, {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        (RERANK, {"documents": ["a"]}, "query"), (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": ["a", 5]}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "a", "documents": ["x" * 2000]}, "documents"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Server, path: str, body: dict[str, Any], field: str) -> None:
    status, error = server.refused(path, **body)
    assert (status, error["param"]) == (400, field), error


def test_models_refuse_the_calls_of_others(server: Server) -> None:
    for path, body, code in (
        (EMBED, {"model": "chat", "input": "a"}, "embeddings_not_supported"),
        (EMBED, {"model": "rank", "input": "a"}, "embeddings_not_supported"),
        (RERANK, {"model": "chat", "query": "a", "documents": ["a"]}, "rerank_not_supported"),
        (RERANK, {"model": "embed", "query": "a", "documents": ["a"]}, "rerank_not_supported"),
        (COMPLETIONS, {"model": "embed", "prompt": "a"}, "generation_not_supported"),
        ("/v1/chat/completions", {"model": "embed", "messages": [{"role": "user", "content": "a"}]},
         "generation_not_supported"),
    ):  # fmt: skip
        status, error = server.refused(path, **body)
        assert (status, error["code"]) == (422, code)
    assert server.ask(COMPLETIONS, prompt="hello")["model"] == "chat"
    assert server.client.post("/api/show", json={"model": "embed"}).json()["capabilities"] == ["embedding"]
    assert server.client.post("/api/show", json={"model": "rank"}).json()["capabilities"] == []


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
def test_documents_by_falling_score(server: Server, path: str) -> None:
    documents = ["xx", {"text": ""}, "x", "y"]
    scores = [1 / (1 + math.exp(count - 1)) for count in (0, 0, 1, 2)]
    answer = server.ask(path, query="q", documents=documents, instruction="find")
    assert [row["index"] for row in answer["results"]] == [1, 3, 2, 0]
    assert [row["relevance_score"] for row in answer["results"]] == pytest.approx(scores)
    best = server.ask(path, query="q", documents=documents, instruction="find", top_n=2, return_documents=True)
    assert [row.pop("document") for row in best["results"]] == [{"text": ""}, {"text": "y"}]
    assert best["results"] == answer["results"][:2]
    assert answer["usage"]["total_tokens"] > 4 * len("find")


def test_ollama(server: Server) -> None:
    answer = server.ask("/api/embed", model="embed", input=["a", "b"])
    assert answer["embeddings"] == [close(expected("a")), close(expected("b"))]
    assert (answer["model"], answer["prompt_eval_count"]) == ("embed", 6)
    assert server.ask("/api/embeddings", model="embed", prompt="a") == {"embedding": close(expected("a"))}
    for nothing in ({}, {"input": ""}, {"input": []}):
        assert server.ask("/api/embed", **nothing)["embeddings"] == []
    cut = server.ask("/api/embed", input="x" * 2000)
    assert cut["prompt_eval_count"] == 1023
    assert cut["embeddings"] == [close(expected([BOS, *b"x" * 1021, END]))]
    assert server.ask("/api/embed", input="x" * 20_000)["embeddings"] == cut["embeddings"]  # longer than any prompt
    assert server.client.post("/api/embed", json={"input": "x" * 2000, "truncate": False}).status_code == 400


def test_a_client_that_leaves_ends_its_requests(server: Server) -> None:
    (embedder,) = (model for model in server.serving.models if model.name == "embed")
    with pytest.raises(Exception, match="timed out"):
        server.client.post(EMBED, json={"input": ["a"] * 20, "cache_salt": "mute"}, timeout=0.3)
    assert server.comes_to(lambda: embedder.client.in_flight == 0)


def test_few_of_a_call_run_at_once_and_one_that_is_aborted_ends_all(server: Server) -> None:
    (embedder,) = (model for model in server.serving.models if model.name == "embed")
    most = IN_FLIGHT * embedder.info.max_batch

    async def abort() -> bool:
        return embedder.client.abort("embd0-aborted")

    def post() -> httpx.Response:
        asked = {"input": ["a"] * (most + 20), "cache_salt": "mute"}
        return server.client.post(EMBED, json=asked, headers={"x-request-id": "aborted"})

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post)
        assert server.comes_to(lambda: embedder.client.in_flight == most)
        assert server.run(abort())
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (500, "aborted")
    assert server.comes_to(lambda: embedder.client.in_flight == 0)


def test_the_page_lists_the_models_that_write(server: Server) -> None:
    assert server.client.get("/page/info").json()["models"] == ["chat"]
