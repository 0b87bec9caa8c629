"""Requests to DeepSeek's /beta: that of Continue's deepseek provider, and a conversation whose answer is begun."""

from __future__ import annotations

from tests.server.http.harness import Server

BODY = {
    "model": "fake", "prompt": "def f(a):\n    ", "suffix": "\n", "max_tokens": 6, "temperature": 0.01, "top_p": 1,
    "frequency_penalty": 0, "presence_penalty": 0, "stop": ["\n\n", "<|endoftext|>"], "stream": True,
}  # fmt: skip


def test_every_chunk_has_a_text(server: Server) -> None:
    *chunks, done = server.stream("/beta/completions", **BODY)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "\x01def f"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    whole = server.ask("/beta/completions", **BODY | {"stream": False, "speculation": {"mode": "off"}})
    assert whole["choices"][0]["text"] == "\x01def f"


def test_a_begun_answer(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well", "prefix": True}]
    found = server.ask("/beta/chat/completions", messages=messages)
    assert (
        found["choices"][0]["message"] == server.ask("/v1/chat/completions", messages=messages)["choices"][0]["message"]
    )
