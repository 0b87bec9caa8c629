"""How a client's request becomes an engine request, field by field."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine_client import EngineClient
from server.grpc.messages import REASONS, event_message
from server.grpc.request_reader import parse_generate
from server.served_model import ServedModel
from specdec.api.params import grammar_message, read_grammar
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import options_pb2 as options
from specdec.client.messages import event_of
from specdec.config import EngineConfig
from specdec.core.types import (
    DrafterStats,
    Finished,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
    TextRules,
    Timings,
    Usage,
)
from specdec.errors import InvalidRequestError, ViolationCollector
from tests.fake_engine import FINGERPRINT, INFO, MAX_CONTEXT
from tests.server.client_convert import stream_request
from tests.server.fake_tokenizer import FakeTokenizer

IDS = st.lists(st.integers(0, 255), max_size=4).map(tuple)
NAME = st.text(st.characters(codec="utf-8"), max_size=8)
FEW = st.integers(1, 16)
COUNT = st.integers(0, 2**32 - 1)
CHOICES = st.lists(NAME.filter(bool), min_size=1, max_size=3, unique=True)
GRAMMARS = st.one_of(
    st.just(GrammarParams(GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    st.just(GrammarParams(GrammarKind.JSON_OBJECT)),
    st.just(GrammarParams(GrammarKind.REGEX, "[a-f]+")),
    st.just(GrammarParams(GrammarKind.EBNF, 'start: "a" | "b"')),
    CHOICES.map(lambda texts: GrammarParams(GrammarKind.CHOICE, json.dumps(texts, ensure_ascii=False))),
)
RULES = st.none() | st.builds(
    TextRules, max_lines=FEW, min_indent=st.none() | st.integers(0, 9), blank_line=st.booleans(),
    closers=st.none() | st.text(")]}", max_size=3), suffix=NAME, lead=st.sampled_from(["", "\n  "]),
)  # fmt: skip


def _resumable(request: Request) -> Request:
    """One sample resumes with a known seed, after no more tokens than the limit."""
    if request.resume is None:
        return request
    resume = replace(request.resume, token_ids=request.resume.token_ids[: request.stopping.max_tokens])
    sampling = replace(request.sampling, n=1, seed=request.sampling.seed or 5)
    return replace(request, resume=resume, sampling=sampling)


REQUESTS = st.builds(
    Request,
    request_id=st.just("r"),
    prompt_ids=st.just((7, 8)),
    sampling=st.builds(
        SamplingParams, temperature=st.sampled_from([0.0, 0.7]), top_k=st.integers(0, 9), top_p=st.just(0.5),
        seed=st.none() | st.integers(0, 2**64 - 1), n=FEW,
    ),
    stopping=st.builds(
        StoppingParams, max_tokens=st.none() | FEW, stop_token_ids=IDS, ignore_eos=st.booleans(), rules=RULES,
        time_limit_s=st.sampled_from([0.5, 2.0]), decode_limit_s=st.none() | st.just(0.25), finish_line=st.booleans(),
    ),
    output=st.builds(OutputParams, logprobs=st.none() | st.integers(0, 20), text=st.booleans(), trees=st.booleans()),
    speculation=st.builds(
        SpeculationParams, mode=st.sampled_from(SpeculationMode), drafters=st.none() | st.just(("suffix",)),
        max_nodes=st.none() | FEW, max_depth=st.none() | FEW, width=st.none() | FEW,
    ),
    priority=st.integers(-9, 9),
    cache_salt=NAME,
    prediction_ids=IDS,
    session=NAME,
    target_tpot_ms=st.none() | st.floats(0.001, 1000),
    grammar=st.none() | GRAMMARS,
    resume=st.none() | st.builds(
        ResumeParams, token_ids=IDS, text_characters=st.none() | COUNT, numeric_fingerprint=st.just(FINGERPRINT)
    ),
).map(_resumable)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> ServedModel:
    found = ServedModel(
        cast(
            EngineClient,
            SimpleNamespace(info=INFO, engine=SimpleNamespace(config=EngineConfig(target="m")), file_errors=Counter()),
        )
    )
    found.load(FakeTokenizer())
    return found


@given(request=REQUESTS)
def test_a_request_round_trips(model: ServedModel, request: Request) -> None:
    message = stream_request(request)
    message.request_id = request.request_id
    message.token_ids.ids.extend(request.prompt_ids)
    assert asyncio.run(parse_generate(message, model)) == request


def test_every_field_of_a_request_is_in_the_property_above() -> None:
    seen = {name: set[Any]() for name in (f.name for f in dataclasses.fields(Request))}

    @given(request=REQUESTS)
    def collect(request: Request) -> None:
        for name, values in seen.items():
            values.add(getattr(request, name))

    collect()
    constant = {name for name, values in seen.items() if len(values) < 2}
    carried_otherwise = {
        "request_id",
        "prompt_ids",
        "deadline_s",
        "healing_prefix",
        "omitted",
        "pooling",
    }
    assert constant == carried_otherwise


@given(grammar=GRAMMARS)
def test_grammars_round_trip(grammar: GrammarParams) -> None:
    violations = ViolationCollector()
    assert read_grammar(grammar_message(grammar), violations) == grammar
    assert not violations.found


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("grammar", pb.GenerateRequest(grammar=options.GrammarOptions())),
        ("grammar.json_object", pb.GenerateRequest(grammar=options.GrammarOptions(json_object=False))),
        ("grammar", pb.GenerateRequest(grammar=options.GrammarOptions(regex=""))),
        ("grammar", pb.GenerateRequest(grammar=options.GrammarOptions(json_schema="x" * (1 << 17)))),
        ("prediction", pb.GenerateRequest(prediction=options.PredictionOptions())),
        (
            "prediction.token_ids",
            pb.GenerateRequest(prediction=options.PredictionOptions(token_ids=options.TokenIds(ids=[1, 256]))),
        ),
        ("scheduling.target_tpot_ms", pb.GenerateRequest(scheduling=options.SchedulingOptions(target_tpot_ms=0))),
        (
            "scheduling.target_tpot_ms",
            pb.GenerateRequest(scheduling=options.SchedulingOptions(target_tpot_ms=math.nan)),
        ),
    ],
)
def test_incomplete_and_bad_fields_are_rejected(model: ServedModel, field: str, message: pb.GenerateRequest) -> None:
    message.token_ids.ids.append(1)
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(parse_generate(message, model))
    assert [v.field for v in caught.value.violations] == [field]


FINISHED = st.builds(
    Finished, st.just("r"), COUNT, st.sampled_from(sorted(REASONS)), st.none() | NAME | COUNT,
    st.builds(Usage, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT),
    st.builds(
        SpeculationStats, COUNT, COUNT, COUNT, COUNT, st.lists(COUNT, max_size=4),
        st.dictionaries(NAME, st.builds(DrafterStats, COUNT, COUNT), max_size=3),
    ),
    st.builds(Timings, *[st.floats(0, 1e9)] * 5),
)  # fmt: skip


@given(FINISHED)
def test_the_end_of_a_sample_round_trips(event: Finished) -> None:
    message = event_message(pb.GenerateStreamResponse, event, "")
    back = pb.GenerateStreamResponse.FromString(message.SerializeToString())
    assert event_of(back, "r") == event
    metrics, stats = back.finished.metrics.speculative_decoding, event.stats
    assert metrics.mean_acceptance_length == stats.mean_acceptance_length
    assert metrics.draft_acceptance_rate == stats.draft_acceptance_rate
    rates = {name: part.draft_acceptance_rate for name, part in metrics.by_drafter.items()}
    assert rates == {name: part.draft_acceptance_rate for name, part in stats.by_drafter.items()}


def test_prompt_plus_resumed_tokens_beyond_the_context_are_rejected_before_the_engine(model: ServedModel) -> None:
    resume = options.ResumeOptions(token_ids=[1] * MAX_CONTEXT, numeric_fingerprint=FINGERPRINT)
    message = pb.GenerateRequest(token_ids=options.TokenIds(ids=[1]), resume=resume)
    message.sampling.temperature = 0.0
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(parse_generate(message, model))
    assert [v.field for v in caught.value.violations] == ["resume.token_ids"]


def test_a_bad_time_is_refused_without_another_unit_than_its_fields(model: ServedModel) -> None:
    message = pb.GenerateRequest(text="a", stopping=options.StoppingOptions(time_limit_ms=-1.0))
    with pytest.raises(InvalidRequestError) as caught:
        asyncio.run(parse_generate(message, model))
    (violation,) = caught.value.violations
    assert (violation.field, violation.description) == ("stopping.time_limit_ms", "must be a positive number")
