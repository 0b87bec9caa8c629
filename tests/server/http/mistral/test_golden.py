"""The requests of Continue's mistral provider, of minuet's codestral, and the fields of the answer that each reads."""

from __future__ import annotations

from typing import Any

import pytest

from server.http.mistral import parse_fim
from tests.server.fake_tokenizer import BOS
from tests.server.http.calls import Fim, asked, make_context, violations
from tests.server.http.harness import Server

FIM = "/v1/fim/completions"
CONTINUE = {
    "model": "fake", "prompt": "def f(a):\n    ", "suffix": "\n", "max_tokens": 6, "temperature": 0.01, "top_p": 1,
    "frequency_penalty": 0, "presence_penalty": 0, "stop": ["[PREFIX]", "[SUFFIX]", "\n+++++ "], "stream": True,
}  # fmt: skip
MINUET = {"model": "fake", "stream": True, "prompt": "ab", "suffix": "z", "max_tokens": 4, "stop": ["\n\n"]}


@pytest.mark.parametrize(("body", "wanted"), [(CONTINUE, "\x01def f"), (MINUET, "\x01ab\x02")])
def test_streams(server: Server, body: dict[str, Any], wanted: str) -> None:
    headers = {"x-api-key": "none", "authorization": "Bearer none"}
    plain = server.client.post(FIM, json=body | {"stream": False}, headers=headers).json()
    assert plain["choices"][0]["message"]["content"] == wanted
    assert (plain["object"], plain["choices"][0]["finish_reason"]) == ("chat.completion", "length")
    assert plain["usage"]["completion_tokens"] == len(wanted)
    *chunks, done = server.stream(FIM, **body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == wanted  # in every one of them
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


def test_mistrals_field_names_and_defaults() -> None:
    def request(**body: Any) -> Any:
        return asked(parse_fim, {"prompt": "a"} | body, server=make_context(fim=Fim())).requests[0]

    assert request(random_seed=5).sampling.seed == 5
    assert request().stopping.max_tokens == 128
    assert request(suffix="z").prompt_ids == (1, *b"a", 2, *b"z", 3)
    assert request(prompt="a!").prompt_ids == (BOS, *b"a!")  # the text at a file's end, no special token
    assert request(prompt="a!", parse_special=True).prompt_ids == (BOS, ord("a"), 255)
    assert request(speculation={"mode": "off"}).speculation.mode == "off"
    for prompt in (None, ["a", "b"], [1, 2], 5):
        assert [v.field for v in violations(parse_fim, {"prompt": prompt})] == ["prompt"]


def test_a_failing_stream_reports_an_error(server: Server) -> None:
    *_, last = server.stream(FIM, prompt="a", cache_salt="broken")
    assert last["error"]["code"] == "model_broken"
    assert server.refused(FIM, prompt="a", cache_salt="full")[0] == 429
