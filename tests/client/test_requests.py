"""Requests of a client reach the engine unchanged, and the engine's events reach the client unchanged."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine_client import EngineClient
from server.grpc.messages import REASONS, event_message, info_message, load_message, sample_message
from server.grpc.request_reader import parse_generate
from server.served_model import ServedModel
from specdec.api.v1 import completion_pb2 as completion
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import result_pb2 as result
from specdec.api.v1.options_pb2 import SpeculationOptions
from specdec.client.messages import (
    completion_message,
    event_of,
    fill_prompt,
    fill_request,
    generated_of,
    info_of,
    reason_of,
    record_of,
)
from specdec.client.prompt import ChatTurn, CompletionHints, ContextFile, Fim, GenerateOptions
from specdec.config import EngineConfig
from specdec.core.types import (
    EngineInfo,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    ServerLoad,
    SpeculationMode,
    SpeculationParams,
    Started,
    StoppingParams,
)
from tests.fake_engine import INFO
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.test_request_reader import FINISHED, REQUESTS

# Where fields of `Request` without an option of the same name are set.
ELSEWHERE = {"prompt_ids": "", "prediction_ids": "prediction", "deadline_s": "timeout_s"}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    found = ServedModel(
        cast(EngineClient, SimpleNamespace(info=INFO, engine=SimpleNamespace(config=EngineConfig(target="m"))))
    )
    found.load(FakeTokenizer())
    return found


def options_of(request: Request) -> GenerateOptions:
    values = {ELSEWHERE.get(f.name, f.name): getattr(request, f.name) for f in fields(Request)}
    del values[""], values["healing_prefix"], values["omitted"], values["pooling"]
    return cast(GenerateOptions, values)


@given(request=REQUESTS)
@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.GenerateStreamRequest])
def test_a_request_arrives_unchanged(model: ServedModel, kind: Any, request: Request) -> None:
    message = fill_request(kind(), list(request.prompt_ids), options_of(request))
    assert asyncio.run(parse_generate(kind.FromString(message.SerializeToString()), model)) == request


def test_every_field_of_a_request_can_be_set() -> None:
    names = {ELSEWHERE.get(f.name, f.name) for f in fields(Request)} - {
        "",
        "healing_prefix",  # of completions
        "omitted",  # the server's
        "pooling",  # of embeddings, which the HTTP port makes
    }
    assert names | {"model", "supersedes_key", "template_variables"} == set(GenerateOptions.__annotations__)


def test_omitted_fields_have_the_in_process_defaults(model: ServedModel) -> None:
    message = fill_request(pb.GenerateRequest(), [1], {"request_id": "r"})
    assert asyncio.run(parse_generate(message, model)) == Request("r", (1,))


def test_every_kind_of_prompt_and_the_fields_that_the_reader_omits() -> None:
    asked: GenerateOptions = {"model": "m", "supersedes_key": "k", "prediction": "old text"}
    message = fill_request(pb.GenerateRequest(), "hello", asked)
    assert (message.text, message.model, message.scheduling.supersedes_key) == ("hello", "m", "k")
    assert message.prediction.text == "old text"
    turns = [ChatTurn("system", "a"), ChatTurn("user", "b")]
    chat = fill_request(pb.GenerateRequest(), turns, {"template_variables": {"style": "short"}}).chat
    assert chat.template_variables == '{"style": "short"}'
    for prompt in ("a", [1], Fim("p")):
        with pytest.raises(TypeError, match=r"^template_variables: need a conversation"):
            fill_request(pb.GenerateRequest(), prompt, {"template_variables": {"style": "short"}})
    assert [(m.role, m.content) for m in chat.messages] == [("system", "a"), ("user", "b")]
    extra = (ContextFile("x.py", "y = 1", 17, 0.5), ContextFile("z.py", ""))
    fim = fill_request(pb.GenerateRequest(), Fim("p", "s", "m", extra, "repo", "f.py", "python"), {}).fim
    assert (fim.prefix, fim.suffix, fim.middle_prefix, fim.repo_name, fim.file_name, fim.language) == (
        "p", "s", "m", "repo", "f.py", "python",
    )  # fmt: skip
    assert [(f.filename, f.text, f.time_ms, f.score) for f in fim.extra] == [
        ("x.py", "y = 1", 17, 0.5),
        ("z.py", "", 0, 0),
    ]
    assert not fill_request(pb.GenerateRequest(), Fim("p"), {}).fim.HasField("middle_prefix")
    for empty, which in (("", "text"), ([], "token_ids")):
        assert fill_request(pb.GenerateRequest(), empty, {}).WhichOneof("prompt") == which
    assert not fill_request(pb.GenerateRequest(), "x", {}).HasField("prediction")


def test_token_ids_are_any_integers_and_nothing_else() -> None:
    ids = cast(Any, list(np.array([5, 6, 7])))
    assert list(fill_request(pb.GenerateRequest(), ids, {}).token_ids.ids) == [5, 6, 7]
    assert fill_request(pb.GenerateRequest(), np.array([3, 4]), {}).token_ids.ids == [3, 4]  # type: ignore[arg-type]
    mixed = [1, ChatTurn("user", "b")], [ChatTurn("user", "b"), {"role": "user"}]
    for other in ([1, 2.0], [1, "a"], *mixed, [-1], [1 << 32], b"text", None, 5):
        with pytest.raises(TypeError, match=r"prompt: must be .* token ids, all of them integers"):
            fill_request(pb.GenerateRequest(), cast(Any, other), {})


def test_bug_a_kind_of_prompt_that_a_call_does_not_take_ended_in_an_attribute_error() -> None:
    for other in ([], [1], Fim("p"), [ChatTurn("user", "b"), {"role": "user"}], None):
        with pytest.raises(TypeError, match=r"^prompt: must be a text or a conversation$"):
            fill_prompt(pb.TokenizeRequest(), cast(Any, other))
    for no_gap in ("a", [1], [ChatTurn("user", "b")]):
        with pytest.raises(TypeError, match=r"^prompt: must be a gap$"):
            completion_message(cast(Any, no_gap), CompletionHints(), {})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"prediction": b"text"}, "prediction: must be a text, or token ids, all of them integers"),
        ({"prediction": 5}, "prediction: must be a text, or token ids, all of them integers"),
        ({"prediction": [1.5]}, "prediction: must be a text, or token ids, all of them integers"),
        ({"stopping": StoppingParams(stop=cast(Any, "ab"))}, r"stopping\.stop: must be a list of texts"),
    ],
)
def test_bug_bytes_are_no_prediction_and_a_text_is_no_list_of_stops(asked: GenerateOptions, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        fill_request(pb.GenerateRequest(), "x", asked)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"sampling": SamplingParams(top_k=-1)}, r"top_k: cannot be -1 \("),
        ({"sampling": SamplingParams(temperature=cast(Any, "hot"))}, r"temperature: cannot be 'hot' \("),
        ({"sampling": SamplingParams(logit_bias=((-1, 2.0),))}, r"logit_bias: cannot be \(\(-1, 2\.0\),\) \("),
        ({"stopping": StoppingParams(stop_token_ids=(-1,))}, r"stop_token_ids: cannot be \(-1,\) \("),
        ({"speculation": SpeculationParams(cast(Any, "fast"))}, r"mode: cannot be 'fast' \("),
        ({"sampling": SamplingParams(temperature=10**400)}, r"temperature: cannot be 10{98} \("),
        ({"speculation": SpeculationParams(cast(Any, 3))}, r"mode: cannot be 3 \("),
        ({"priority": 1 << 40}, r"scheduling\.priority: cannot be 1099511627776 \("),
    ],
)
def test_bug_a_value_that_no_message_can_hold_names_its_field(asked: GenerateOptions, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        fill_request(pb.GenerateRequest(), "x", asked)


def test_a_prediction_may_be_an_array() -> None:
    asked = cast(GenerateOptions, {"prediction": np.array([3, 4])})
    assert fill_request(pb.GenerateRequest(), "x", asked).prediction.token_ids.ids == [3, 4]


def test_fill_in_the_middle_uses_the_servers_sampling_by_default() -> None:
    hints = CompletionHints("middle_or_prefix", 640, False, True, None)
    options = {
        "model": "m", "cache_salt": "s", "session": "e", "priority": 2, "prediction": "old", "supersedes_key": "k",
        "output": OutputParams(logprobs=3, trees=True), "speculation": SpeculationParams(SpeculationMode.OFF),
        "grammar": GrammarParams(GrammarKind.REGEX, "a+"),
    }  # fmt: skip
    message = completion_message(Fim("p", "s"), hints, cast(GenerateOptions, options))
    assert not message.HasField("sampling")
    assert not message.HasField("stopping")
    found = message.completion
    assert (found.mode, found.max_prompt_tokens) == (completion.CompletionOptions.MODE_MIDDLE_OR_PREFIX, 640)
    assert (found.stop_at_dedent, found.stop_at_bracket, found.HasField("stop_at_suffix")) == (False, True, False)
    assert (message.fim.prefix, message.model, message.cache.salt, message.session.id) == ("p", "m", "s", "e")
    assert (message.scheduling.priority, message.scheduling.supersedes_key) == (2, "k")
    assert (message.output.logprobs, message.prediction.text, message.grammar.regex) == (3, "old", "a+")
    assert message.speculation.mode == SpeculationOptions.MODE_OFF
    encoded = completion_message(Fim("p"), CompletionHints(), {"sampling": SamplingParams(temperature=0.5)})
    assert encoded.sampling.temperature == 0.5
    plain = completion_message(Fim("p"), CompletionHints(), {})
    assert {field.name for field, _ in plain.ListFields() if field.name in ("prediction", "grammar")} == set()
    modes = {name.removeprefix("MODE_").lower() for name, _ in completion.CompletionOptions.Mode.items()}
    assert modes - {"unspecified"} == {"middle", "middle_or_prefix", "prefix"}


def test_an_option_that_does_not_exist_is_refused() -> None:
    misplaced = cast(GenerateOptions, {"max_tokens": 24, "session": "s"})
    with pytest.raises(TypeError, match=r"^max_tokens: not among the options .*stopping.*StoppingParams\(max_tokens"):
        fill_request(pb.GenerateRequest(), "text", misplaced)
    with pytest.raises(TypeError, match=r"^max_tokens: "):
        completion_message(Fim("a", "b"), CompletionHints(), misplaced)


@given(event=FINISHED)
def test_the_end_of_a_sample_arrives_unchanged(event: Any) -> None:
    sample = sample_message([], event)
    (heard,) = generated_of(pb.GenerateResponse(samples=[sample])).samples
    assert (heard.index, heard.reason, heard.matched_stop) == (event.index, event.reason, event.matched_stop)
    assert (heard.usage, heard.stats, heard.timings) == (event.usage, event.stats, event.timings)


def test_reasons_are_the_engines_and_unknown_ones_are_accepted() -> None:
    assert {number: reason_of(number) for number in REASONS.values()} == {n: r for r, n in REASONS.items()}
    assert set(FinishReason) - set(REASONS) == {FinishReason.DEADLINE}
    assert reason_of(max(result.FinishReason.values()) + 1) == FinishReason.ABORTED


def test_info_and_figures_arrive_unchanged() -> None:
    info = INFO
    assert info_of(info_message(info, 3)) == info
    plain = EngineInfo(**{f.name: getattr(info, f.name) for f in fields(info)} | {"draft": None})
    assert info_of(info_message(plain, 0)).draft is None
    load = ServerLoad(1, 2, 3, 4, 5.5, 6, 7, 8, 9)
    assert record_of(ServerLoad, load_message(load)) == load


@given(st.builds(Started, st.just("r"), st.integers(0, 2**64 - 1), st.just(3), st.just(2), st.just(0.5)))
def test_the_start_of_a_sample_arrives_unchanged(event: Started) -> None:
    assert event_of(event_message(pb.GenerateStreamResponse, event, "m"), "other") == event
    assert event_of(pb.GenerateStreamResponse(), "r") is None  # of a later version
