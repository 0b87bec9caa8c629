"""llama.cpp's `logit_bias` and `n_probs`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from server.http.llamacpp_completions import MAX_TEXTS, parse_completion, parse_infill
from server.http.openai_format import logprob_entries
from specdec.core.fields import MAX_BIAS, MAX_LOGPROBS
from specdec.core.types import TokenLogprobs
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import violations
from tests.server.http.harness import Server
from tests.server.http.llamacpp.test_llamacpp import completion, infill


def bias(given: Any) -> dict[int, float]:
    return dict(completion(logit_bias=given).request.sampling.logit_bias)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([], {}), ({}, {}), (None, {}),
        ([[97, 1.5], [98, -2]], {97: 1.5, 98: -2.0}),
        ([[97, False]], {97: -MAX_BIAS}),
        ([["ab", 0.5]], {97: 0.5, 98: 0.5}),
        ([["aa", 1], [97, 0.25]], {97: 2.25}),
        ([["ab", False], [97, 50]], {97: -MAX_BIAS, 98: -MAX_BIAS}),
        ({"97": 1, "b": False}, {97: 1.0, 98: -MAX_BIAS}),
        ({"é": 1}, {233: 1.0}), ([["", 1]], {}),
        ([["7", 1]], {55: 1.0}),  # in a list only a number is an id
    ],
)  # fmt: skip
def test_logit_bias_in_every_form(given: Any, wanted: dict[int, float]) -> None:
    assert bias(given) == wanted


def test_both_endpoints_accept_logit_bias() -> None:
    assert infill(logit_bias=[[97, 1.0]], n_probs=2).request.sampling.logit_bias == ((97, 1.0),)
    assert infill(n_probs=2).request.output.logprobs == 2


@pytest.mark.parametrize(
    "given",
    [
        5, "a", [5], [[97]], [[97, 1, 2]], [[97, True]], [[97, None]], [[97, "1"]], [[True, 1]], [[1.5, 1]],
        [[None, 1]], {"a": None}, {"a": True}, {"a": [1]}, [{"97": 1}], [[-1, 1]], [[256, 1]], [[97, 1e5]],
        [["a", 9e3], ["a", 9e3]],
        [["a", 1]] * (MAX_TEXTS + 1),
    ],
)  # fmt: skip
def test_invalid_logit_bias_is_named(given: Any) -> None:
    assert {v.field for v in violations(parse_completion, {"prompt": "a", "logit_bias": given})} & {
        "logit_bias", "sampling.logit_bias",
    }  # fmt: skip


def test_stop_strings_up_to_the_limit() -> None:
    assert bias([["a", 1]] * MAX_TEXTS) == {97: float(MAX_TEXTS)}


def test_n_probs() -> None:
    assert completion().request.output.logprobs is None
    assert completion(n_probs=0).request.output.logprobs is None
    assert completion(n_probs=MAX_LOGPROBS).request.output.logprobs == MAX_LOGPROBS
    assert completion(post_sampling_probs=True).request.output.logprobs is None
    assert completion(n_probs=3, post_sampling_probs=False).request.output.logprobs == 3


@pytest.mark.parametrize("reader", [parse_completion, parse_infill])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n_probs": MAX_LOGPROBS + 1}, "n_probs"), ({"n_probs": -1}, "n_probs"), ({"n_probs": "2"}, "n_probs"),
        ({"n_probs": 1, "post_sampling_probs": True}, "post_sampling_probs"),
        ({"post_sampling_probs": 1}, "post_sampling_probs"),
    ],
)  # fmt: skip
def test_unsupported_n_probs_is_rejected(reader: Any, body: dict[str, Any], field: str) -> None:
    found = violations(reader, {"prompt": "a", "input_prefix": "", "input_suffix": "", **body})
    assert field in [violation.field for violation in found]


def test_the_shape_of_a_probability() -> None:
    rows = [TokenLogprobs(97, -0.5, [(98, -0.25), (2, -math.inf)]), TokenLogprobs(0xC3, -math.inf)]
    assert logprob_entries(FakeTokenizer(), rows, with_ids=True) == [
        {
            "id": 97, "token": "a", "bytes": [97], "logprob": -0.5,
            "top_logprobs": [
                {"id": 98, "token": "b", "bytes": [98], "logprob": -0.25},
                {"id": 2, "token": "<bos>", "bytes": list(b"<bos>"), "logprob": -9999.0},
            ],
        },
        {"id": 0xC3, "token": "\ufffd", "bytes": [0xC3], "logprob": -9999.0, "top_logprobs": []},
    ]  # fmt: skip


def test_responses_contain_probabilities(server: Server) -> None:
    body = {"prompt": "abc", "n_predict": 3, "return_tokens": True}
    whole = server.ask("/completion", **body, n_probs=2)
    likely = whole["completion_probabilities"]
    assert [row["id"] for row in likely] == whole["tokens"]
    about = [(row["token"], row["logprob"], len(row["top_logprobs"])) for row in likely]
    assert about[1:] == [("a", -0.5, 2), ("b", -0.5, 2)]
    assert "completion_probabilities" not in server.ask("/completion", **body)
    *parts, last = server.stream("/completion", **body, n_probs=2)
    assert [row for part in parts for row in part["completion_probabilities"]] == likely
    assert "completion_probabilities" not in last
    picked = server.ask("/completion", **body, n_probs=2, response_fields=["completion_probabilities"])
    assert picked == {"completion_probabilities": likely}
    assert not [p for p in server.stream("/completion", **body) if "completion_probabilities" in p]


def test_each_sample_has_its_own_probabilities(server: Server) -> None:
    answer: Any = server.ask("/completion", prompt="abc", n_predict=2, n_cmpl=2, n_probs=1, return_tokens=True)
    for one in answer:
        assert [row["id"] for row in one["completion_probabilities"]] == one["tokens"]


def test_an_error_names_the_field_of_the_body(server: Server) -> None:
    status, error = server.refused("/completion", prompt="a", logit_bias=[[999, 1]])
    assert (status, error["field"]) == (400, "logit_bias")
    assert "ids must lie in" in error["message"]
