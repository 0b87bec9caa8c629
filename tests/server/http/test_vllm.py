"""vLLM's own endpoints, which extend OpenAI's."""

from __future__ import annotations

from typing import Any

from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.harness import CHAT, MESSAGES, RESPOND, Server, running

TALK = [{"role": "user", "content": "hi"}]


def test_tokenize_a_text(server: Server) -> None:
    expected = {"max_model_len": 128, "token_strs": None}
    assert server.ask("/tokenize", prompt="a!") == expected | {"count": 3, "tokens": [BOS, 97, 255]}
    found = server.ask("/tokenize", model="fake", prompt="a", add_special_tokens=False, return_token_strs=True)
    assert found == expected | {"count": 1, "tokens": [97], "token_strs": ["a"]}


def test_tokenize_a_conversation(server: Server) -> None:
    assert bytes(server.ask("/tokenize", messages=TALK)["tokens"]) == b"user:hi;"
    assert bytes(server.ask("/tokenize", messages=TALK, add_generation_prompt=False)["tokens"]) == b"user:hi"
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert bytes(server.ask("/tokenize", messages=TALK, tools=tools)["tokens"]) == b"[look]user:hi;"


class BlankTokenizer(FakeTokenizer):
    """Its chat template renders to nothing, and its texts have no begin token."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return super().encode(text, add_special=False, parse_special=parse_special)

    def encode_chat(self, *_: Any, **__: Any) -> list[int]:
        return []


def test_an_empty_prompt_is_refused_only_where_text_is_generated() -> None:
    with running(BlankTokenizer) as server:
        for body in ({"messages": TALK}, {"prompt": ""}):
            found = server.ask("/tokenize", **body)
            assert (found["count"], found["tokens"]) == (0, [])
        assert server.ask("/apply-template", messages=TALK) == {"prompt": ""}
        assert server.ask(f"{MESSAGES}/count_tokens", messages=TALK) == {"input_tokens": 0}
        begun = [*TALK, {"role": "assistant", "content": "ab", "prefix": True}]
        assert server.ask("/tokenize", messages=begun)["tokens"] == [97, 98]
        for path, field, asked in (
            (CHAT, "messages", {"messages": TALK}), (f"{CHAT}/render", "messages", {"messages": TALK}),
            (MESSAGES, "messages", {"messages": TALK, "max_tokens": 1}), (RESPOND, "input", {"input": "a"}),
            ("/api/chat", "messages", {"messages": TALK}), ("/api/generate", "prompt", {"prompt": "a"}),
            ("/completion", "prompt", {"prompt": ""}),
        ):  # fmt: skip
            response = server.client.post(path, json=asked)
            assert response.status_code == 400, path
            assert field in response.text, path
            assert "must hold at least one token" in response.text, path


def test_detokenize(server: Server) -> None:
    assert server.ask("/detokenize", model="fake", tokens=[97, BOS])["prompt"] == "a\x02"


def test_invalid_fields_are_named_in_openais_form(server: Server) -> None:
    for field, body in (
        ("prompt", {"prompt": 5}), ("prompt", {"prompt": "a", "messages": TALK}), ("prompt", {"prompt": None}),
        ("messages", {"messages": 5}), ("return_token_strs", {"prompt": "a", "return_token_strs": 5}),
    ):  # fmt: skip
        status, error = server.refused("/tokenize", **body)
        assert (status, error["param"]) == (400, field)
    assert server.refused("/tokenize", prompt="a", model="other")[0] == 404
    assert server.refused("/detokenize", tokens=[1], model="other")[0] == 404


def test_special_tokens_by_name(server: Server) -> None:
    found = server.client.get("/tokenizer_info").json()
    assert found == {"bos_token": "<bos>", "eos_token": "\x00", "pad_token": "\x00"}
