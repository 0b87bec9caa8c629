"""vLLM's own endpoints, which extend OpenAI's."""

from __future__ import annotations

from tests.server.fake_tokenizer import BOS
from tests.server.http.harness import Server

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
