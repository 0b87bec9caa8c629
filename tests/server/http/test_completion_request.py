"""How a body of /v1/completions becomes an engine request, field by field."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from server.completion.prompt_packer import FimNotSupportedError
from server.errors import UnknownModelError
from server.http.openai_completions import parse_completion
from server.json_body import Body, write_json
from server.request_fields import read_grammar
from server.served_model import model_names
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.errors import PromptTooLongError, ViolationCollector
from tests.server.fake_tokenizer import BOS
from tests.server.http.calls import Fim, asked, make_context, violations

PLAIN = Request("cmpl-r", (BOS, *b"hi"), stopping=StoppingParams(max_tokens=16))


def request(**fields: Any) -> Request:
    """The one request of a body with the prompt "hi"."""
    (found,) = asked(parse_completion, {"prompt": "hi", **fields}, {"x-request-id": "r"}).requests
    return found


def test_a_minimal_body_gets_the_defaults() -> None:
    ask = asked(parse_completion, {"prompt": "hi"}, {"x-request-id": "r"})
    assert ask.requests == (PLAIN,)
    assert (ask.stream, ask.echo, ask.own["return_token_ids"]) == (False, [""], False)
    assert request(unknown={"deep": [1]}, user="somebody", model=None) == PLAIN


SAMPLING = [
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.5, "top_p": 0.25, "min_p": 0.125}, {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125}),
    ({"top_k": 7}, {"top_k": 7}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2},
     {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0}),
    ({"logit_bias": {"9": -100, "3": 1.5}}, {"logit_bias": ((3, 1.5), (9, -100.0))}),
    ({"logit_bias": {}}, {}),
    ({"allowed_token_ids": [4, 5]}, {"allowed_token_ids": (4, 5)}),
    ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": -1}, {}),
    ({"seed": -2}, {"seed": 2**64 - 2}),
    ({"seed": 5.0}, {"seed": 5}),
    ({"n": 3}, {"n": 3}),
    ({"n": 3, "best_of": 3}, {"n": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), SAMPLING)
def test_sampling(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(**fields) == dataclasses.replace(PLAIN, sampling=SamplingParams(**wanted))


STOPPING = [
    ({"max_tokens": 0}, {"max_tokens": 0}),
    ({"max_tokens": -1, "min_tokens": 20}, {"max_tokens": None, "min_tokens": 20}),
    ({"max_tokens": None}, {}),
    ({"max_tokens": 2**32 - 1}, {"max_tokens": 2**32 - 1}),
    ({"max_tokens": 5.0, "min_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"stop": ["a", "b", "a"]}, {"stop": ("a", "b")}),
    ({"stop": [str(i) for i in range(32)] * 2}, {"stop": tuple(str(i) for i in range(32))}),
    ({"stop": ["a", "<bos>"]}, {"stop": ("a", "<bos>"), "stop_token_ids": (BOS,)}),
    ({"stop": "<bos>", "stop_token_ids": [7, BOS]}, {"stop": ("<bos>",), "stop_token_ids": (7, BOS)}),
    ({"include_stop_str_in_output": True, "ignore_eos": True}, {"include_stop": True, "ignore_eos": True}),
]


@pytest.mark.parametrize(("fields", "wanted"), STOPPING)
def test_stop_conditions(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(**fields) == dataclasses.replace(PLAIN, stopping=StoppingParams(**({"max_tokens": 16} | wanted)))


SPECULATION = [
    ({}, {}),
    ({"mode": "off"}, {"mode": SpeculationMode.OFF}),
    ({"mode": "MODE_ON"}, {"mode": SpeculationMode.ON}),
    ({"mode": "MODE_UNSPECIFIED", "drafters": []}, {}),
    ({"drafters": ["suffix"], "max_nodes": 0, "max_depth": 63, "width": 16},
     {"drafters": ("suffix",), "max_nodes": 0, "max_depth": 63, "width": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), SPECULATION)
def test_speculation(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert request(speculation=fields) == dataclasses.replace(PLAIN, speculation=SpeculationParams(**wanted))


SCHEMA = {"type": "object", "properties": {"é": {}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"), ensure_ascii=False)
CLOSED = TEXT.replace("{", '{"additionalProperties":false,', 1)
GRAMMARS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, (GrammarKind.JSON_OBJECT,)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
     (GrammarKind.JSON_SCHEMA, CLOSED)),
    # As huggingface_hub sends a json_schema.
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, (GrammarKind.JSON_SCHEMA, CLOSED)),
    ({"guided_json": SCHEMA}, (GrammarKind.JSON_SCHEMA, CLOSED)),
    ({"guided_json": TEXT}, (GrammarKind.JSON_SCHEMA, CLOSED)),
    ({"guided_regex": "[a-f]+"}, (GrammarKind.REGEX, "[a-f]+")),
    ({"guided_choice": ["a", "é"]}, (GrammarKind.CHOICE, '["a","é"]')),
    ({"guided_grammar": "start: \"a\""}, (GrammarKind.EBNF, "start: \"a\"")),
    ({"structured_outputs": {"json": SCHEMA}}, (GrammarKind.JSON_SCHEMA, CLOSED)),
    ({"structured_outputs": {"regex": "a"}}, (GrammarKind.REGEX, "a")),
    ({"structured_outputs": {"choice": ["a"]}}, (GrammarKind.CHOICE, '["a"]')),
    ({"structured_outputs": {"grammar": "root ::= \"a\""}}, (GrammarKind.EBNF, "root ::= \"a\"")),
    ({"structured_outputs": {"json_object": True}}, (GrammarKind.JSON_OBJECT,)),
    ({"regex": "[a-f]+"}, (GrammarKind.REGEX, "[a-f]+")),
    ({"ebnf": "root ::= \"a\""}, (GrammarKind.EBNF, "root ::= \"a\"")),
    # As guidance sends it to any version of vLLM.
    ({"guided_grammar": "start: \"a\"", "structured_outputs": {"grammar": "start: \"a\""}},
     (GrammarKind.EBNF, "start: \"a\"")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), GRAMMARS)
def test_grammars(fields: dict[str, Any], wanted: tuple[Any, ...] | None) -> None:
    grammar = None if wanted is None else GrammarParams(*wanted)
    assert request(**fields) == dataclasses.replace(PLAIN, grammar=grammar)


def test_a_schema_that_is_too_long_is_left_to_the_check_of_its_length() -> None:
    """Closing its objects first would hold up all other calls."""
    schema = {"properties": {f"p{i}": {"type": "object", "properties": {}} for i in range(2000)}}
    params = read_grammar(Body({"schema": schema}, ViolationCollector()), "schema", GrammarKind.JSON_SCHEMA)
    assert params == GrammarParams(GrammarKind.JSON_SCHEMA, write_json(schema).decode())


def test_other_fields() -> None:
    assert request(
        logprobs=2, skip_special_tokens=False, priority=-3, cache_salt="s", session="mine", target_tpot_ms=2.5,
        prediction={"type": "content", "content": "ab"},
    ) == dataclasses.replace(
        PLAIN, output=OutputParams(logprobs=2, skip_special_tokens=False), priority=-3, cache_salt="s", session="mine",
        target_tpot_ms=2.5, prediction_ids=tuple(b"ab"),
    )  # fmt: skip
    parts = {"type": "content", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}
    assert request(prediction=parts).prediction_ids == tuple(b"ab")
    (by_header,) = asked(parse_completion, {"prompt": "hi"}, {"x-session-id": "header"}).requests
    (both,) = asked(parse_completion, {"prompt": "hi", "session": "field"}, {"x-session-id": "header"}).requests
    assert (by_header.session, both.session) == ("header", "field")


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("hi", [(BOS, *b"hi")]),
        ("a!", [(BOS, ord("a"), 255)]),  # special tokens are read as such
        ([7, 8], [(7, 8)]),
        (["a", "b"], [(BOS, ord("a")), (BOS, ord("b"))]),
        ([[7], [8, 9]], [(7,), (8, 9)]),
        (["a", [8]], [(BOS, ord("a")), (8,)]),
        ("", [(BOS,)]),
    ],
)
def test_prompts(prompt: Any, wanted: list[tuple[int, ...]]) -> None:
    requests = asked(parse_completion, {"prompt": prompt, "n": 2}, {"x-request-id": "r"}).requests
    assert [r.prompt_ids for r in requests] == wanted
    ids = ["cmpl-r"] if len(wanted) == 1 else [f"cmpl{i}-r" for i in range(len(wanted))]
    assert [r.request_id for r in requests] == ids
    assert {r.sampling.n for r in requests} == {2}


def test_encoding_options() -> None:
    assert request(parse_special=False, prompt="!").prompt_ids == (BOS, ord("!"))
    assert request(add_special_tokens=False).prompt_ids == tuple(b"hi")


def test_fill_in_the_middle_is_encoded_or_rejected() -> None:
    server = make_context(fim=Fim())
    requests = asked(parse_completion, {"prompt": ["a", "b"], "suffix": "z"}, server=server).requests
    assert [r.prompt_ids for r in requests] == [(1, *b"a", 2, *b"z", 3), (1, *b"b", 2, *b"z", 3)]
    assert [r.stopping.stop_token_ids for r in requests] == [(7,), (7,)]
    for nothing in ("", None):
        assert asked(parse_completion, {"prompt": "a", "suffix": nothing}, server=server).requests[0].prompt_ids == (
            BOS, *b"a",
        )  # fmt: skip
    with pytest.raises(FimNotSupportedError, match="leave out suffix"):
        asked(parse_completion, {"prompt": "a", "suffix": "z"})


def test_echo() -> None:
    ask = asked(parse_completion, {"prompt": ["hi!", [BOS, 104]], "echo": True, "return_token_ids": True})
    assert (ask.echo, ask.own["return_token_ids"]) == (["hi!", "h"], True)


BAD = [
    ("prompt", {"prompt": None}), ("prompt", {"prompt": 5}), ("prompt", {"prompt": []}), ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", 5]}), ("prompt", {"prompt": [1, True]}), ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": {}}), ("prompt", {"prompt": ["a"] * 129}), ("prompt.token_ids", {"prompt": [1, 256]}),
    ("prompt.token_ids", {"prompt": [[1], [256]]}),
    ("prompt.token_ids", {"prompt": [-1]}), ("prompt.token_ids", {"prompt": [2**63]}), ("suffix", {"suffix": 5}),
    ("suffix", {"suffix": "a", "prompt": [1]}), ("model", {"model": 5}), ("n", {"n": 17}), ("n", {"n": 0}),
    ("n", {"n": "2"}), ("best_of", {"best_of": 2}), ("best_of", {"n": 2, "best_of": 3}),
    ("max_tokens", {"max_tokens": -2}), ("max_tokens", {"max_tokens": 10**30}), ("max_tokens", {"max_tokens": 1.5}),
    ("sampling.temperature", {"temperature": -1}), ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}), ("sampling.top_p", {"top_p": 1.5}), ("top_k", {"top_k": -2}),
    ("seed", {"seed": 2**64}), ("seed", {"seed": "x"}), ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}), ("logit_bias", {"logit_bias": {"\u0661": 1}}),
    ("logit_bias.5", {"logit_bias": {"5": "x"}}), ("sampling.logit_bias", {"logit_bias": {"300": 1}}),
    ("logit_bias", {"logit_bias": {"9" * 5000: 1}}), ("logit_bias", {"logit_bias": []}),
    ("stop", {"stop": 5}), ("stop", {"stop": [5]}), ("stopping.stop", {"stop": [""]}),
    ("stop", {"stop": [str(i) for i in range(65)]}), ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stopping.min_tokens", {"min_tokens": 17}), ("logprobs", {"logprobs": 21}), ("logprobs", {"logprobs": True}),
    ("echo", {"echo": 1}), ("stream", {"stream": "yes"}),
    ("stream_options", {"stream": True, "stream_options": 5}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
    ("speculation", {"speculation": "off"}), ("speculation.mode", {"speculation": {"mode": "never"}}),
    ("speculation.drafters", {"speculation": {"drafters": ["nobody"]}}),
    ("speculation.width", {"speculation": {"width": 17}}), ("speculation.depth", {"speculation": {"depth": 2}}),
    ("speculation.max_nodes", {"speculation": {"max_nodes": 64}}),
    ("priority", {"priority": 2**40}), ("session", {"session": 5}), ("cache_salt", {"cache_salt": 5}),
    ("target_tpot_ms", {"target_tpot_ms": 0}), ("prediction", {"prediction": "text"}),
    ("prediction.content", {"prediction": {"type": "content"}}),
    ("prediction.content", {"prediction": {"content": [5]}}),
    ("prediction.content[0].text", {"prediction": {"content": [{"text": 5}]}}),
    ("prediction.type", {"prediction": {"type": "image", "content": ""}}),
    ("response_format.type", {"response_format": {"type": "yaml"}}), ("response_format.type", {"response_format": {}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema",
     {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ("guided_json", {"guided_json": 5}), ("guided_choice", {"guided_choice": "a"}),
    ("guided_regex", {"guided_regex": 5}),
    ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "json_object": True}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": 5, "json_object": True}}),
    ("grammar", {"guided_regex": ""}), ("grammar", {"guided_json": "x" * (1 << 17)}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_each_bad_field_is_named(field: str, fields: dict[str, Any]) -> None:
    assert field in {v.field for v in violations(parse_completion, {"prompt": "hi", **fields})}


def test_all_bad_fields_are_named_together() -> None:
    found = {
        v.field
        for v in violations(
            parse_completion,
            {"prompt": 5, "n": 99, "top_p": 7, "stop": 5, "speculation": {"width": 99}, "echo": 5},
        )
    }
    assert found == {"prompt", "n", "sampling.top_p", "stop", "speculation.width", "echo"}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}),
        ("guided_grammar", {"guided_grammar": "x"}),
        ("structured_outputs", {"structured_outputs": {"choice": ["x"]}}),
    ],
)
def test_a_grammar_error_names_the_callers_field(field: str, fields: dict[str, Any]) -> None:
    names: dict[str, str] = {}

    async def reader(call: Any) -> None:
        await parse_completion(call)
        names.update(call.field_names)

    asked(reader, {"prompt": "hi", **fields})
    assert names["grammar"] == field


def test_a_too_long_prompt_is_reported_if_no_other_field_is_bad() -> None:
    for prompt, got in (("x" * 127, 128), ([1] * 250_000, 250_000), ([[1], [1] * 200], 200)):
        with pytest.raises(PromptTooLongError) as caught:
            asked(parse_completion, {"prompt": prompt})
        assert (caught.value.limit, caught.value.got) == (127, got)
        assert [v.field for v in violations(parse_completion, {"prompt": prompt, "top_p": 7})] == ["sampling.top_p"]
    assert len(asked(parse_completion, {"prompt": "x" * 126}).requests) == 1


def test_models_have_short_names() -> None:
    assert model_names("/m/Qwen2.5-Coder.GGUF") >= {
        "/m/qwen2.5-coder.gguf", "qwen2.5-coder.gguf", "qwen2.5-coder", "qwen2.5-coder:latest"
    }  # fmt: skip
    assert "smollm2" in model_names("Hub/SmolLM2")
    for name in ("fake", "FAKE", "fake:latest", "", None):
        assert asked(parse_completion, {"prompt": "a", "model": name}).requests
    for name in ("other", "fak", "a/fake"):
        with pytest.raises(UnknownModelError):
            asked(parse_completion, {"prompt": "a", "model": name})
