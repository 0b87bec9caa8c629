"""Answers of /v1/completions, field by field."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.fake_engine import DEFAULT_SEED
from tests.server.fake_tokenizer import BOS
from tests.server.http.harness import Server

BEGIN = chr(BOS)
SPECULATIVE = {
    "mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5, "acceptance_histogram": [1, 1, 1],
    "num_spec_steps": 3, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3, "num_steps": 5,
    "by_drafter": {
        "suffix": {"num_draft_tokens": 4, "num_accepted_draft_tokens": 3, "draft_acceptance_rate": 0.75},
        "idle": {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "draft_acceptance_rate": 0.0},
    },
}  # fmt: skip
HEAD = {"model": "fake", "system_fingerprint": "specdec-0-int8-bitwise-0123456789abcdef"}


def usage(prompt: int, output: int, cached: int = 3, accepted: int = 0, rejected: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected, "reasoning_tokens": 0,
        },
    }  # fmt: skip


def checked(answer: dict[str, Any], kind: str = "text_completion", prefix: str = "cmpl-") -> dict[str, Any]:
    """Check the values of ``answer`` that differ each time, and return the rest."""
    assert answer.pop("id").startswith(prefix)
    assert abs(answer.pop("created") - time.time()) < 60
    assert answer.pop("object") == kind
    return answer


def test_complete_response(server: Server) -> None:
    answer = checked(server.ask(prompt="hello", prediction={"type": "content", "content": "abc"}))
    assert answer == {
        **HEAD,
        "choices": [
            {"index": 0, "text": f"{BEGIN}hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ],
        "usage": usage(6, 6, rejected=3),
        "seed": DEFAULT_SEED,
        "metrics": {"speculative_decoding": SPECULATIVE},
    }


NEXT_EDIT = "<|file_sep|>current/a\nxy\n<|file_sep|>updated/a\n"


def test_the_window_of_a_next_edit_prompt_is_its_prediction(server: Server) -> None:
    def details(prompt: Any = NEXT_EDIT, **body: Any) -> dict[str, Any]:
        found: dict[str, Any] = server.ask(prompt=prompt, **body)["usage"]["completion_tokens_details"]
        return found

    inferred = usage(0, 0, rejected=2)["completion_tokens_details"]
    assert details() == inferred
    assert details(prompt=[BOS, *NEXT_EDIT.encode()]) == inferred
    assert details(prediction={"content": "abc"}) == usage(0, 0, rejected=3)["completion_tokens_details"]
    assert details(speculation={"mode": "off"}) == usage(0, 0)["completion_tokens_details"]


def test_a_stream_has_a_chunk_per_step_and_its_figures_last(server: Server) -> None:
    chunks = server.stream(prompt="hi", seed=7)
    assert chunks.pop() == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [checked(chunk) for chunk in chunks] == [
        *({**HEAD, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]}
          for text in f"{BEGIN}hi"),
        {
            **HEAD,
            "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
            "seed": 7,
            "metrics": {"speculative_decoding": SPECULATIVE},
        },
    ]  # fmt: skip


def test_usage_is_a_chunk_of_its_own_if_requested(server: Server) -> None:
    chunks = server.stream(prompt="hi", stream_options={"include_usage": True})
    assert chunks.pop() == "[DONE]"
    last = checked(chunks.pop())
    assert last == {
        **HEAD, "choices": [], "usage": usage(3, 3), "seed": DEFAULT_SEED,
        "metrics": {"speculative_decoding": SPECULATIVE},
    }  # fmt: skip
    assert all(chunk["usage"] is None and chunk["choices"] and "metrics" not in chunk for chunk in chunks)
    assert all("usage" not in chunk and chunk["choices"] for chunk in server.stream(prompt="hi")[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = server.stream(prompt="hi", stream_options=options)
    counts = [chunk["usage"] for chunk in chunks]
    assert [(c["prompt_tokens"], c["completion_tokens"], c["total_tokens"]) for c in counts] == [
        (3, 1, 4), (3, 2, 5), (3, 3, 6), (3, 3, 6),
    ]  # fmt: skip
    assert last["usage"] == usage(3, 3)
    chunks = server.stream(prompt="hi", stream_options={"continuous_usage_stats": True})[:-1]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    assert server.ask(prompt="hi", stream_options=options)["usage"] == usage(3, 3, cached=3)


def test_choices_are_numbered_across_prompts_and_samples(server: Server) -> None:
    body = {"prompt": ["ab", [99, 100, 101]], "n": 2, "max_tokens": 3, "add_special_tokens": False}
    answer = server.ask(**body)
    # Sample i of the fake echoes the prompt shifted by i.
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "ab"), (1, "ba"), (2, "cde"), (3, "dec")]
    assert answer["usage"] == usage(5, 10, cached=6)
    stats = answer["metrics"]["speculative_decoding"]
    assert (stats["num_steps"], stats["acceptance_histogram"]) == (20, [4, 4, 4])
    assert (stats["mean_acceptance_length"], stats["by_drafter"]["suffix"]["num_draft_tokens"]) == (2.0, 16)
    chunks = server.stream(**body)[:-1]
    texts = [""] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["ab", "ba", "cde", "dec"]
    ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(chunk["choices"][0]["index"] for chunk in ends) == [0, 1, 2, 3]
    assert [("metrics" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["metrics"] == answer["metrics"]


def test_echo_puts_the_prompt_before_each_sample(server: Server) -> None:
    body = {"prompt": ["ab", [BOS, 99]], "n": 2, "max_tokens": 1, "echo": True}
    wanted = [f"ab{BEGIN}", "aba", f"c{BEGIN}", "cc"]
    assert [c["text"] for c in server.ask(**body)["choices"]] == wanted
    texts = [""] * 4
    for chunk in server.stream(**body)[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == wanted


def test_max_tokens_0_only_prefills_the_prompt(server: Server) -> None:
    answer = server.ask(prompt="x" * 40, max_tokens=0)
    assert answer["choices"][0] == {
        "index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert answer["usage"] == usage(41, 0)
    assert [e["choices"][0]["text"] for e in server.stream(prompt="x", max_tokens=0)[:-1]] == [""]
    assert server.ask(prompt="ab", max_tokens=0, echo=True)["choices"][0]["text"] == "ab"


def test_legacy_logprobs(server: Server) -> None:
    def row(token: str, offset: int) -> dict[str, Any]:
        return {
            "text_offset": [offset], "token_logprobs": [-0.5], "tokens": [token],
            "top_logprobs": [{token: -0.5, "\x01": -1.25}],
        }  # fmt: skip

    prompt = [BOS, ord("a"), 0xC3, 0xA9, ord("b")]
    wanted = [row("<bos>", 0), row("a", 0), row("bytes:\\xc3", 1), row("bytes:\\xa9", 1), row("b", 2)]
    chunks = [e["choices"][0]["logprobs"] for e in server.stream(prompt=prompt, logprobs=2)[:-1]]
    assert chunks == [*wanted, None]
    whole = server.ask(prompt=prompt, logprobs=2)["choices"][0]["logprobs"]
    assert whole == {name: [value for part in wanted for value in part[name]] for name in wanted[0]}


def test_token_ids_are_returned_if_requested(server: Server) -> None:
    (choice,) = server.ask(prompt=[97, 98], return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [97, 98])
    choices = [e["choices"][0] for e in server.stream(prompt=[97, 98], return_token_ids=True)[:-1]]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert [c.get("token_ids", []) for c in choices] == [[], [97], [98], []]
    assert all("prompt_token_ids" not in c for c in choices[1:])


def test_fill_in_the_middle(server: Server) -> None:
    answer = server.ask(prompt="a", suffix="b" * 20, echo=True, max_tokens=3)
    assert answer["choices"][0]["text"] == "a\x01a\x02"  # the caller's own text, then the fake's echo
    assert answer["usage"]["prompt_tokens"] == 24


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/"])
def test_content_type_and_a_trailing_slash_do_not_matter(server: Server, path: str) -> None:
    data = b' {"prompt" : "a"}\n'
    for headers in ({}, {"content-type": "text/plain"}, {"authorization": "Bearer whatever"}):
        response = server.client.post(path, content=data, headers=headers)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"


def test_the_callers_id_is_kept(server: Server) -> None:
    response = server.client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert (response.json()["id"], response.headers["x-request-id"]) == ("cmpl-mine", "mine")
    response = server.client.post("/v1/completions", json={"prompt": "a"})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_a_stream_aborted_by_id_ends_with_its_partial_output(server: Server) -> None:
    body = {"prompt": "x" * 100, "max_tokens": 100, "cache_salt": "slow", "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "long"}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")

        async def abort() -> bool:
            return server.serving.client.abort("cmpl-long")

        assert server.run(abort())
        rest = [line for line in lines if line]
    assert '"finish_reason":"abort"' in rest[-2]
    assert rest[-1] == "data: [DONE]"
