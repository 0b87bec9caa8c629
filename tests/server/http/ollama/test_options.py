"""How the objects of a body become fields of the engine's request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.ollama import parse_chat, parse_generate
from specdec.core.types import GrammarKind, Request, SpeculationMode
from tests.server.fake_tokenizer import BOS
from tests.server.http.calls import asked


def request(**body: Any) -> Request:
    """The request of a body, which both endpoints read alike."""
    found = asked(parse_generate, {"prompt": "a", **body}).request
    also = asked(parse_chat, {"messages": [{"role": "user", "content": "a"}], **body}).request
    assert found is not None
    assert also is not None
    assert (found.sampling, found.stopping, found.grammar, found.speculation) == (
        also.sampling, also.stopping, also.grammar, also.speculation
    )  # fmt: skip
    return found


def test_defaults_are_ollamas() -> None:
    bodies: list[dict[str, Any]] = [{}, {"options": None}, {"options": {}}, {"options": {"temperature": None, "n": 4}}]
    for body in bodies:
        sampling, stopping = request(**body).sampling, request(**body).stopping
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.9, 0)
        assert (sampling.repetition_penalty, sampling.seed) == (1, None)
        assert (stopping.max_tokens, stopping.stop) == (None, ())


def test_every_option_is_applied() -> None:
    options = {
        "temperature": 0, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 9, "repeat_penalty": 1.25,
        "presence_penalty": 0.5, "frequency_penalty": 0.75, "num_predict": 5, "stop": ["x", "", "<bos>"],
        "num_ctx": 4096, "mirostat": 0,
    }  # fmt: skip
    sampling, stopping = request(options=options).sampling, request(options=options).stopping
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 3, 0.5, 0.25)
    assert (sampling.seed, sampling.repetition_penalty) == (9, 1.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.75)
    assert (stopping.max_tokens, stopping.stop, stopping.stop_token_ids) == (5, ("x", "<bos>"), (BOS,))


@pytest.mark.parametrize(("limit", "wanted"), [(-1, None), (-2, None), (0, 0), (128, 128), (None, None)])
def test_num_predict(limit: int | None, wanted: int | None) -> None:
    assert request(options={"num_predict": limit}).stopping.max_tokens == wanted


def test_values_that_disable_an_option() -> None:
    assert request(options={"top_k": -1}).sampling.top_k == 0
    assert request(options={"seed": -1}).sampling.seed is None
    off = request(options={"repeat_penalty": 1.5, "repeat_last_n": 0, "repetition_penalty": 2})
    assert off.sampling.repetition_penalty == 1
    assert request(options={"repeat_penalty": 1.5, "repeat_last_n": 64}).sampling.repetition_penalty == 1.5
    assert request(options={"stop": "one"}).stopping.stop == ("one",)


def test_format() -> None:
    assert request(format="").grammar is None
    grammar = request(format="json").grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_OBJECT
    schema = {"type": "object", "properties": {"a": {"enum": ["é"]}}}
    grammar = request(format=schema).grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(grammar.text) == {**schema, "additionalProperties": False}


def test_specdec_fields_are_accepted() -> None:
    found = request(speculation={"mode": "off"}, session="s", prediction={"content": "b"}, priority=3)
    assert (found.speculation.mode, found.session, found.priority) == (SpeculationMode.OFF, "s", 3)
    assert bytes(found.prediction_ids) == b"b"
