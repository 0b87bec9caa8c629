"""Answers of /api/generate, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from server.completion.prompt_packer import PackedPrompt
from server.completion.requests import RequestMaker
from specdec.errors import InvalidRequestError
from tests.fake_engine import DEFAULT_SEED
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.harness import Server, running
from tests.server.http.ollama.lines import FIGURES, GENERATE, lines, refused, timed
from tests.server.http.test_completions import SPECULATIVE

BEGIN = chr(BOS)
EXTRAS = {"seed": DEFAULT_SEED, "metrics": {"speculative_decoding": SPECULATIVE}}


def whole(server: Server, **body: Any) -> dict[str, Any]:
    return timed(server.ask(GENERATE, stream=False, **body))


def test_complete_response(server: Server) -> None:
    ids = [*b"user:hi;"]
    assert whole(server, model="fake:latest", prompt="hi") == {
        "model": "fake:latest", "response": "user:hi;", "done": True, "done_reason": "length",
        "context": ids + ids, "prompt_eval_count": 8, "eval_count": 8, **FIGURES, **EXTRAS,
    }  # fmt: skip


def test_streaming_is_the_default_with_one_line_per_step(server: Server) -> None:
    found = [timed(line) for line in lines(server, prompt="hi", raw=True, options={"seed": 7})]
    assert found == [
        *({"model": "fake", "response": text, "done": False} for text in f"{BEGIN}hi"),
        {
            "model": "fake", "response": "", "done": True, "done_reason": "length", "prompt_eval_count": 3,
            "eval_count": 3, **FIGURES, **EXTRAS, "seed": 7,
        },
    ]  # fmt: skip


def test_a_conversation_continues_from_its_context(server: Server) -> None:
    first = lines(server, prompt="a", system="b", options={"num_predict": 2})[-1]["context"]
    assert bytes(first) == b"system:b;user:a;sy"
    second = whole(server, prompt="c", context=first, options={"num_predict": 1})
    assert bytes(second["context"]) == b"system:b;user:a;sy" + b"user:c;" + b"s"
    assert second["prompt_eval_count"] == len(first) + 7


def test_fields_of_the_engine_request(server: Server) -> None:
    def prompt(**body: Any) -> str:
        return str(whole(server, **body)["response"])

    assert prompt(prompt="a!") == "user:a!;"  # a special token spelled out is none
    assert prompt(prompt="a!", raw=True) == f"{BEGIN}a\xff"  # here it is
    assert prompt(prompt="a", suffix="b") == "\x01a\x02b\x03"
    assert prompt(prompt="", suffix="b") == "\x01\x02b\x03"
    assert prompt(prompt="a", suffix="b", raw=True) == f"{BEGIN}a"
    template = "<fim_prefix>a<fim_suffix>b!<fim_middle>"
    assert prompt(prompt=template) == prompt(prompt=template, raw=True) == f"{BEGIN}{template}".replace("!", "\xff")
    assert prompt(prompt="<fim_prefix>!") == "user:<fim_prefix>!;"  # talk of it is no template


def test_a_gap_is_filled_in_the_scope_of_its_salt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[str] = []
    pack = RequestMaker.pack_between

    async def seen(maker: RequestMaker, *texts: Any, salt: str = "") -> PackedPrompt:
        salts.append(salt)
        return await pack(maker, *texts, salt=salt)

    monkeypatch.setattr(RequestMaker, "pack_between", seen)
    whole(server, prompt="a", suffix="b", cache_salt="one")
    assert salts == ["one"]


def test_without_a_chat_template_the_prompt_is_continued() -> None:
    with running(lambda: FakeTokenizer(has_chat=False)) as server:
        assert whole(server, prompt="a", system="b")["response"] == f"{BEGIN}b\n\na"
        message = refused(server, GENERATE, 422, prompt="a", suffix="b")
        assert "filling in the middle" in message


class Refusing(FakeTokenizer):
    """Its template takes no system message."""

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise InvalidRequestError.of("messages[0].role", "no system here")
        return super().encode_chat(messages, **options)


def test_what_the_template_refuses_is_the_prompt() -> None:
    with running(Refusing) as server:
        assert whole(server, prompt="a")["response"] == "user:a;"
        for context in ({}, {"context": [1]}):
            assert refused(server, GENERATE, 400, prompt="a", system="b", **context) == "prompt: no system here"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": "", "suffix": "a", "raw": True}, {"prompt": None}])
def test_an_empty_request_returns_immediately(server: Server, body: dict[str, Any], stream: bool) -> None:
    answer = timed(server.ask(GENERATE, keep_alive=0, stream=stream, **body))
    assert answer == {"model": "fake", "response": "", "done": True, "done_reason": "load"}


def test_num_predict_0_only_prefills_the_prompt(server: Server) -> None:
    answer = whole(server, prompt="a", raw=True, options={"num_predict": 0})
    assert (answer["response"], answer["done_reason"], answer["eval_count"]) == ("", "length", 0)


@pytest.mark.parametrize(
    ("named", "body"),
    [
        ("options.temperature", {"options": {"temperature": -1}}),
        ("options.num_predict", {"options": {"num_predict": -3}}),
        ("options.repeat_penalty", {"options": {"repeat_penalty": 0}}),
        ("options.repetition_penalty", {"options": {"repetition_penalty": 0}}),
        ("options.top_p", {"options": {"top_p": 2}}),
        ("options.min_p", {"options": {"min_p": 2}}),
        ("options.stop", {"options": {"stop": [1]}}),
        ("options.stop", {"options": {"stop": [str(i) for i in range(65)]}}),
        ("options.stop_token_ids", {"options": {"stop_token_ids": [256]}}),
        ("options.logit_bias", {"options": {"logit_bias": {"256": 1}}}),
        ("options.frequency_penalty", {"options": {"frequency_penalty": 1e9}}),
        ("options", {"options": []}),
        ("format", {"format": "yaml"}),
        ("format", {"format": 5}),
        ("images", {"images": ["iVBORw0KGgo="]}),
        ("raw", {"raw": True, "system": "a"}),
        ("raw", {"raw": True, "template": "a"}),
        ("raw", {"raw": True, "context": [1]}),
        ("context", {"context": [256]}),
        ("context", {"context": ["a"]}),
        ("prompt", {"prompt": 5}),
        ("stream", {"stream": "yes"}),
        ("speculation.width", {"speculation": {"width": 99}}),
    ],
)
def test_invalid_fields_are_named(server: Server, named: str, body: dict[str, Any]) -> None:
    assert refused(server, GENERATE, 400, **{"prompt": "a", **body}).startswith(f"{named}: ")


def test_all_invalid_fields_are_named_together(server: Server) -> None:
    body = {"prompt": "a", "format": 5, "options": {"temperature": -1, "min_p": 7}, "suffix": 1}
    message = refused(server, GENERATE, 400, **body)
    assert all(f"{name}: " in message for name in ("format", "options.temperature", "options.min_p", "suffix"))


def test_other_errors(server: Server) -> None:
    assert refused(server, GENERATE, 404, model="llama3", prompt="a").startswith("model not found: model 'llama3'")
    assert "retry" in refused(server, GENERATE, 429, prompt="a", cache_salt="full")
    response = server.client.post(GENERATE, content=b"{")
    assert (response.status_code, set(response.json())) == (400, {"error"})


def test_an_error_after_the_first_line_is_a_line_without_done(server: Server) -> None:
    with server.client.stream("POST", GENERATE, json={"prompt": "a", "cache_salt": "broken"}) as response:
        found = [line for line in response.iter_lines() if line]
    assert found[-1] == '{"error":"no finite logit"}'


def test_speculation_reaches_the_engine(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "abc", "raw": True, "speculation": {"width": 2, "mode": "on"}}
    assert [line["response"] for line in lines(server, **body)] == [f"{BEGIN}a", "bc", ""]
