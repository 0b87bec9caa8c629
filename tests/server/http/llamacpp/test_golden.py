"""Verbatim requests of llama.vscode, llama.vim, Continue and Tabby's server, and the fields that each reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_engine import BOOK
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.editor import AT, BEHIND
from tests.server.http.harness import Server, events
from tests.server.http.tabby.book_server import book_server
from tests.server.several_models import several

LINE = BOOK[AT : BOOK.index("\n", AT)]
HEAD = BOOK[BOOK.rindex("\n", 0, AT) + 1 : AT]
GAP = {"input_prefix": BOOK[: AT - len(HEAD)], "input_suffix": "\n" + BOOK[BEHIND:], "prompt": HEAD}
EXTRA = [{"text": "colours = 3\n" * 5, "time": 1732200000000, "filename": "src/a.ts"}]
VSCODE = {
    "id_slot": 0, **GAP, "input_extra": EXTRA, "n_predict": 128, "n_cmpl": 3, "top_k": 40, "top_p": 0.99,
    "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 4,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 500, "lora": [{"id": 0, "scale": 0.5}],
}  # fmt: skip
FIELDS = [
    "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms", "timings/prompt_per_second",
    "timings/predicted_n", "timings/predicted_ms", "timings/predicted_per_token_ms", "timings/predicted_per_second",
    "truncated", "tokens_cached",
]  # fmt: skip
VIM = {
    **GAP, "input_extra": [EXTRA[0] | {"time": [1763, 512345]}],
    "stop": ["never"], "n_indent": 4, "top_k": 40, "top_p": 0.90, "stream": False,
    "n_predict": 128, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250, "response_fields": FIELDS,
}  # fmt: skip
CONTINUE = {
    "model": "book", "prompt": BOOK[:AT], "stream": True, "n_predict": len(LINE), "frequency_penalty": 0,
    "presence_penalty": 0, "min_p": 0, "mirostat": 0, "stop": ["<|endoftext|>"], "top_k": 100, "top_p": 1,
    "temperature": 0.01,
}  # fmt: skip
TABBY = {
    "seed": 7, "prompt": BOOK[:AT], "n_predict": len(LINE), "temperature": 0.1, "stream": True, "penalty_last_n": 0,
    "presence_penalty": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server over the book engine."""
    with book_server() as found:
        yield found


def typed(answer: dict[str, Any]) -> None:
    """The fields that llama.vscode's LlamaResponse declares."""
    assert isinstance(answer["content"], str)
    assert isinstance(answer["generation_settings"], dict)
    assert type(answer["tokens_cached"]) is int
    assert answer["truncated"] is False
    for name in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"):
        assert isinstance(answer["timings"][name], int | float)


def test_llama_vscode(server: Server) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    one = server.ask("/infill", **{k: v for k, v in VSCODE.items() if k != "n_cmpl"})
    typed(one)
    assert one["content"].startswith(LINE)
    assert one["timings"]["predicted_n"] > 0
    assert one["generation_settings"]["n_predict"] == VSCODE["n_predict"]
    assert (
        one["tokens_cached"] == one["timings"]["prompt_n"] + one["timings"]["cache_n"] + one["timings"]["predicted_n"]
    )
    props = server.client.get("/props", params={"model": "book", "autoload": "false"}).json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    warm = server.ask(
        "/infill", **GAP, input_extra=EXTRA, n_predict=0, samplers=[], cache_prompt=True, t_max_prompt_ms=500,
        t_max_predict_ms=1,
    )  # fmt: skip
    assert (warm["content"], warm["tokens_predicted"]) == ("", 0)
    assert warm["tokens_evaluated"] > 0


def test_llama_vscode_reads_the_number_of_slots(server: Server) -> None:
    status, error = server.refused("/infill", **VSCODE | {"n_cmpl": 99})
    assert (status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert re.search(r"Field 'n_cmpl': Value must be between 1 <= value <= (\d+), but got (\d+)", error["message"])


def test_llama_vim(server: Server) -> None:
    response = server.client.post("/infill", json=VIM)
    raw = response.text
    assert re.search(r'"content"\s*:', raw)
    assert raw == json.dumps(response.json(), separators=(",", ":"))
    answer = response.json()
    assert list(answer) == FIELDS
    assert answer["content"].startswith(LINE)
    for name in FIELDS[1:9]:
        assert "%.2f" % answer[name]  # noqa: UP031 - it prints them so
    ring = {
        "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0, "temperature": 0.0,
        "stream": False, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
        "response_fields": [""],
    }  # fmt: skip
    assert server.client.post("/infill", json=ring).text == "{}"


@pytest.mark.parametrize(("path", "body"), [("/completion", CONTINUE), ("/completion", TABBY), ("/completions", TABBY)])
def test_continue_and_tabbys_server(server: Server, path: str, body: dict[str, Any]) -> None:
    with server.client.stream("POST", path, json=body) as response:
        assert response.headers["content-type"] == "text/event-stream"
        found = events(response.read())
    for event in found:  # no [DONE]: Tabby's server reads each as one of these
        assert isinstance(event["content"], str)
        assert isinstance(event["stop"], bool)
    assert "".join(event["content"] for event in found) == LINE
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1]["stop_type"], found[-1]["tokens_evaluated"]) == ("limit", len(BOOK[:AT].encode()))


def test_a_model_without_fill_in_the_middle_is_an_error(plain: Server) -> None:
    status, error = plain.refused("/infill", **GAP)
    assert (status, error["code"], error["type"]) == (422, 422, "not_supported_error")


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """A server whose model supports neither fill-in-the-middle nor chat."""
    with book_server(lambda: CodeTokenizer(())) as found:
        yield found


def test_health_reports_that_the_model_is_loading() -> None:
    with book_server(wait=False) as server:
        response = server.client.get("/health")
        assert response.status_code == 503
        error = response.json()["error"]
        assert (error["code"], error["type"]) == (503, "unavailable_error")
        assert server.comes_to(lambda: server.serving.client.engine.is_ready)  # the tokenizer is still to be loaded
        assert server.client.get("/health").json()["error"]["message"] == "Loading model"


def test_health_reports_a_shutdown() -> None:
    with book_server() as server:
        server.run(server.serving.models.first.gate.drain(0))
        response = server.client.get("/health")
        assert (response.status_code, response.json()["error"]["reason"]) == (503, "draining")


def test_health_is_that_of_the_server() -> None:
    """While one of several models drains, the others take requests."""
    with several() as server:
        server.serving.models.first.gate.close()
        assert [server.client.get(path).status_code for path in ("/readyz", "/health")] == [200, 200]
